/*
 * base: what every other folder stands on. Depends on libc, zlib and OpenMP only.
 *
 * Rules that hold everywhere:
 *   - a function that can fail returns an enum qt_status (0 or negative) and, when it fails, fills
 *     its last parameter `struct qt_err *err` once, where the fact is known;
 *   - libraries never print, exit or assert on input;
 *   - open/close for resources, new/free for memory; every free accepts NULL.
 */
#ifndef QT_BASE_BASE_H
#define QT_BASE_BASE_H

#include "base/backend.h"
#include "base/io.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/par.h"
#include "base/status.h"

#define QT_VERSION "0.1.0"

#endif
