/* The style sheet and the script of the report (style.c). */
#ifndef QT_VERIFY_REPORT_STYLE_H
#define QT_VERIFY_REPORT_STYLE_H

extern const char report_style[], report_script[];

#endif
