/*
 * base: errors, memory, files, numbers, threads, ranks and the backend interface. Every other
 * folder uses it; it depends on libc, zlib, utf8proc and OpenMP only.
 *
 * Conventions of all folders except cli/ and kernels/cuda/:
 *   - a function that can fail returns an int: a value of enum qt_status, 0 or negative; the
 *     function that detects the failure fills the last parameter, `struct qt_err *err`;
 *   - libraries never print, exit, or assert on input;
 *   - resources have open/close, memory has new/free, unless a comment names another function that
 *     frees; close and free accept NULL.
 */
#ifndef QT_BASE_BASE_H
#define QT_BASE_BASE_H

#include "base/act.h"
#include "base/backend.h"
#include "base/behind.h"
#include "base/comm.h"
#include "base/io.h"
#include "base/kv4.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/par.h"
#include "base/status.h"
#include "base/stop.h"
#include "base/tempdir.h"

#define QT_VERSION        "0.2.0"
#define QT_VERSION_NUMBER 200 /* major * 10000 + minor * 100 + patch */

#endif
