/* json.h: strings in JSON text (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_JSON_H
#define HIPSIM_JSON_H

#include <stdio.h>

enum { JSON_BYTE = 8 }; /* room for one byte of a string */

/* One byte of a string as it stands in JSON: itself, or an escape if it is no
 * printable ASCII character. Returns `text`. */
static inline const char *json_byte(char byte, char text[JSON_BYTE])
{
    unsigned code = (unsigned char)byte;

    if (code < 0x20 || code >= 0x7f) {
        (void)snprintf(text, JSON_BYTE, "\\u%04x", code);
    } else {
        (void)snprintf(text, JSON_BYTE,
                       code == '"' || code == '\\' ? "\\%c" : "%c", (int)code);
    }
    return text;
}

#endif
