/* lines.h: source lines of a code object that was built with -g (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_LINES_H
#define HIPSIM_LINES_H

#include "sim.h"

typedef struct sim_lines sim_lines; /* immutable, shared by threads */

/* Reads .debug_line (DWARF 2 to 5) of an ELF file whose header has been
 * checked. `text` and `text_bytes` are the executable segment's. NULL if the
 * file has no lines, or no readable ones: never an error, and what is corrupt
 * is left out. The file may be freed after. */
sim_lines *sim_lines_read(const uint8_t *file, size_t size, uint64_t text,
                          uint64_t text_bytes);
void sim_lines_free(sim_lines *lines); /* accepts NULL */

/* File and line of the instruction at `text_offset` bytes into the text; false
 * if it has none. `lines` may be NULL. *file lives as long as `lines`; it is
 * the name that the compiler was given, relative to where it ran. */
bool sim_lines_find(const sim_lines *lines, uint64_t text_offset,
                    const char **file, unsigned *line);

/* "file.hip:12", without folders, into text; false, and "", if there is none. */
bool sim_lines_place(const sim_lines *lines, uint64_t text_offset, char *text,
                     size_t size);

#endif
