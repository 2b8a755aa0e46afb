/* lines.c: .debug_line -> which source line an instruction came from.
 *
 * Runs every line number program once, when the object is loaded, into one
 * table sorted by address. The file is not trusted: each read is bounded, and
 * a unit that makes no sense ends the reading of its own rows only. Left out:
 * 64-bit DWARF, which clang does not write by itself, and compressed sections.
 * Source: DWARF 5, chapter 6.2.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "lines.h"
#include "object.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Limits that no real object comes near. */
enum { MAX_ROWS = 1 << 22, MAX_FILES = 1 << 16, MAX_NAME = 1024 };

enum {
    LNS_COPY = 1,
    LNS_ADVANCE_PC,
    LNS_ADVANCE_LINE,
    LNS_SET_FILE,
    LNS_CONST_ADD_PC = 8,
    LNS_FIXED_ADVANCE_PC,
    LNE_END_SEQUENCE = 1,
    LNE_SET_ADDRESS = 2,
    LNCT_PATH = 1,
    LNCT_DIRECTORY_INDEX = 2
};

/* From this address on; line 0: no source line. NO_FILE: a sequence ends. */
#define NO_FILE UINT32_MAX

typedef struct line_row {
    uint32_t offset; /* bytes into the text */
    uint32_t order;  /* in which the programs made it */
    uint32_t file, line;
} line_row;

struct sim_lines {
    uint64_t text, text_bytes;
    line_row *row;
    size_t row_count, row_room;
    char **file;
    size_t file_count, file_room;
};

/* ---- bytes --------------------------------------------------------------- */

/* What is left to read; after a read beyond the end all reads give 0. */
typedef struct span {
    const uint8_t *at, *end;
    bool failed;
} span;

static const uint8_t *take(span *from, uint64_t bytes)
{
    const uint8_t *at = from->at;

    if (bytes > (uint64_t)(from->end - from->at)) {
        from->failed = true;
        from->at = from->end;
        return NULL;
    }
    from->at += bytes;
    return at;
}

/* A little-endian number of up to 8 bytes. */
static uint64_t number(span *from, unsigned bytes)
{
    const uint8_t *at = take(from, bytes);
    uint64_t value = 0;

    for (unsigned i = 0; at != NULL && i < bytes; i++) {
        value |= (uint64_t)at[i] << 8 * i;
    }
    return value;
}

static uint64_t leb(span *from, bool is_signed)
{
    uint64_t value = 0, byte = 0x80;
    unsigned shift = 0;

    while ((byte & 0x80) != 0 && !from->failed) {
        byte = number(from, 1);
        value |= shift < 64 ? (byte & 0x7f) << shift : 0;
        shift += shift < 64 ? 7 : 0;
    }
    return is_signed && shift < 64 && (byte & 0x40) != 0
               ? value | UINT64_MAX << shift
               : value;
}

/* A string that ends within the span; "" if it does not. */
static const char *string(span *from)
{
    const uint8_t *at = from->at;
    size_t left = (size_t)(from->end - at);
    const uint8_t *zero = left != 0 ? memchr(at, 0, left) : NULL;

    if (zero == NULL) {
        (void)take(from, (uint64_t)left + 1);
        return "";
    }
    from->at = zero + 1;
    return (const char *)at;
}

static const char *string_at(const span *section, uint64_t offset)
{
    span rest = *section;

    return take(&rest, offset) != NULL ? string(&rest) : "";
}

/* ---- the table ----------------------------------------------------------- */

/* Grows an array of `size`-byte items by one; NULL: no memory or too many. */
static void *room_for(void *items, size_t count, size_t *room, size_t size,
                      size_t limit)
{
    if (count < *room) {
        return items;
    }
    size_t grown = *room != 0 ? 2 * *room : 64;
    void *moved = count < limit ? realloc(items, grown * size) : NULL;
    *room = moved != NULL ? grown : *room;
    return moved;
}

static bool add_row(sim_lines *lines, uint64_t address, uint64_t file,
                    uint32_t line)
{
    if (address < lines->text || address - lines->text > lines->text_bytes) {
        return true; /* of a function that the linker has left out */
    }
    line_row *row = room_for(lines->row, lines->row_count, &lines->row_room,
                             sizeof *row, MAX_ROWS);
    if (row == NULL) {
        return false;
    }
    lines->row = row;
    row[lines->row_count] =
        (line_row){.offset = (uint32_t)(address - lines->text),
                   .order = (uint32_t)lines->row_count,
                   .file = (uint32_t)file,
                   .line = file < lines->file_count ? line : 0};
    lines->row_count++;
    return true;
}

/* The file `name` in `directory`, which is "" for where the compiler ran. */
static bool add_file(sim_lines *lines, const char *directory, const char *name)
{
    char **file = room_for(lines->file, lines->file_count, &lines->file_room,
                           sizeof *file, MAX_FILES);
    char path[MAX_NAME];
    bool joined = directory[0] != '\0' && name[0] != '/';

    if (file == NULL) {
        return false;
    }
    lines->file = file;
    (void)snprintf(path, sizeof path, "%s%s%s", joined ? directory : "",
                   joined ? "/" : "", name);
    for (char *c = path; *c != '\0'; c++) { /* reports are one line */
        *c = (unsigned char)*c < ' ' || *c == 0x7f ? '?' : *c;
    }
    file[lines->file_count] = strdup(path);
    if (file[lines->file_count] == NULL) {
        return false;
    }
    lines->file_count++;
    return true;
}

/* By address; at the same one what was made last comes last, but the end of a
 * sequence does not hide the beginning of another. */
static int compare_rows(const void *left, const void *right)
{
    const line_row *a = left, *b = right;

    return a->offset != b->offset
               ? (a->offset > b->offset) - (a->offset < b->offset)
           : (a->file == NO_FILE) != (b->file == NO_FILE)
               ? (b->file == NO_FILE) - (a->file == NO_FILE)
               : (a->order > b->order) - (a->order < b->order);
}

/* ---- one unit ------------------------------------------------------------ */

typedef struct sections {
    span line, line_str, str;
} sections;

typedef struct unit {
    span rest; /* the tables, then the program */
    unsigned version;
    unsigned instruction_bytes; /* per step of the address */
    int line_base;
    unsigned line_range, opcode_base;
    uint8_t operands[256]; /* of the standard opcodes */
    size_t first_file;     /* what file 0 is in sim_lines.file */
} unit;

/* A directory or file of DWARF 5, by its list of (content, form). */
static bool read_entry(span *from, span formats, unsigned count,
                       const sections *all, const char **path, uint64_t *index)
{
    for (unsigned i = 0; i < count; i++) {
        uint64_t content = leb(&formats, false), form = leb(&formats, false);
        const char *text = "";
        uint64_t value = 0;
        switch (form) {
        case 0x08: /* string */
            text = string(from);
            break;
        case 0x0e: /* strp */
            text = string_at(&all->str, number(from, 4));
            break;
        case 0x1f: /* line_strp */
            text = string_at(&all->line_str, number(from, 4));
            break;
        case 0x0b: /* data1, 2, 4, 8, 16 */
            value = number(from, 1);
            break;
        case 0x05:
            value = number(from, 2);
            break;
        case 0x06:
            value = number(from, 4);
            break;
        case 0x07:
            value = number(from, 8);
            break;
        case 0x1e:
            (void)take(from, 16);
            break;
        case 0x0f: /* udata */
            value = leb(from, false);
            break;
        case 0x09: /* block */
            (void)take(from, leb(from, false));
            break;
        default:
            return false;
        }
        *path = content == LNCT_PATH ? text : *path;
        *index = content == LNCT_DIRECTORY_INDEX ? value : *index;
    }
    return !from->failed && !formats.failed && count != 0;
}

/* The list of formats at the start of a table, and how many entries follow. */
static span read_formats(span *from, unsigned *count, uint64_t *entries)
{
    span formats = *from;

    *count = (unsigned)number(from, 1);
    formats.at = from->at;
    for (unsigned i = 0; i < 2 * *count; i++) {
        (void)leb(from, false);
    }
    *entries = leb(from, false);
    return formats;
}

/* DWARF 5: directory 0 is where the compiler ran. */
static bool read_tables_5(sim_lines *lines, unit *u, const sections *all)
{
    unsigned dir_fields, file_fields;
    uint64_t dirs, files, index = 0;
    const char **dir, *path = "";
    bool good = true;

    span formats = read_formats(&u->rest, &dir_fields, &dirs);
    if (dirs > (uint64_t)(u->rest.end - u->rest.at)) {
        return false; /* each has at least a byte */
    }
    dir = calloc((size_t)dirs + 1, sizeof *dir);
    good = dir != NULL;
    for (uint64_t i = 0; good && i < dirs; i++) {
        path = "";
        good = read_entry(&u->rest, formats, dir_fields, all, &path, &index);
        dir[i] = path;
    }
    formats = read_formats(&u->rest, &file_fields, &files);
    for (uint64_t i = 0; good && i < files; i++) {
        path = "";
        index = 0;
        good =
            read_entry(&u->rest, formats, file_fields, all, &path, &index) &&
            add_file(lines, index != 0 && index < dirs ? dir[index] : "", path);
    }
    free((void *)dir);
    return good;
}

/* Before: both lists end with an empty string and count from 1. */
static bool read_tables_2(sim_lines *lines, unit *u)
{
    const char **dir = NULL, *name;
    size_t dirs = 1, room = 0;
    bool good = add_file(lines, "", ""); /* there is no file 0 */

    while (good && (name = string(&u->rest))[0] != '\0') {
        const char **grown = (const char **)room_for((void *)dir, dirs, &room,
                                                     sizeof *dir, MAX_FILES);
        good = grown != NULL;
        if (good) {
            dir = grown;
            dir[dirs++] = name;
        }
    }
    while (good && (name = string(&u->rest))[0] != '\0') {
        uint64_t index = leb(&u->rest, false);
        (void)leb(&u->rest, false); /* time, size */
        (void)leb(&u->rest, false);
        good =
            !u->rest.failed &&
            add_file(lines, index != 0 && index < dirs ? dir[index] : "", name);
    }
    free((void *)dir);
    return good && !u->rest.failed;
}

/* Reads up to the program; false if this unit cannot be used. */
static bool read_header(sim_lines *lines, unit *u, const sections *all)
{
    u->version = (unsigned)number(&u->rest, 2);
    if (u->version < 2 || u->version > 5) {
        return false;
    }
    if (u->version == 5) {
        (void)number(&u->rest, 2); /* size of addresses and segments */
    }
    uint64_t header_bytes = number(&u->rest, 4);
    span program = u->rest;
    (void)take(&program, header_bytes);
    u->instruction_bytes = (unsigned)number(&u->rest, 1);
    (void)number(&u->rest, u->version >= 4 ? 2 : 1); /* VLIW, is_stmt */
    u->line_base = (int8_t)number(&u->rest, 1);
    u->line_range = (unsigned)number(&u->rest, 1);
    u->opcode_base = (unsigned)number(&u->rest, 1);
    for (unsigned i = 1; i < u->opcode_base; i++) {
        u->operands[i] = (uint8_t)number(&u->rest, 1);
    }
    u->first_file = lines->file_count;
    if (program.failed || u->rest.failed || u->line_range == 0 ||
        !(u->version == 5 ? read_tables_5(lines, u, all)
                          : read_tables_2(lines, u))) {
        return false;
    }
    u->rest = program;
    return true;
}

/* The registers of the line number machine that matter here. */
typedef struct machine {
    uint64_t address, file;
    uint32_t line;
    bool begun; /* the sequence has a row */
} machine;

/* Runs the program; rows whose address goes backwards are left out. */
static bool run_program(sim_lines *lines, unit *u)
{
    static const machine initial = {.file = 1, .line = 1};
    machine m = initial;
    uint64_t reached = 0;
    bool good = true;

    while (good && u->rest.at < u->rest.end) {
        unsigned opcode = (unsigned)number(&u->rest, 1);
        bool emit = false;
        if (opcode >= u->opcode_base) {
            unsigned step = opcode - u->opcode_base;
            m.address += step / u->line_range * u->instruction_bytes;
            m.line += (uint32_t)(u->line_base + (int)(step % u->line_range));
            emit = true;
        } else if (opcode == 0) {
            span operand = {u->rest.at, NULL, false};
            uint64_t bytes = leb(&u->rest, false);
            operand.at = take(&u->rest, bytes);
            operand.end = u->rest.at;
            if (operand.at == NULL) {
                return false;
            }
            opcode = (unsigned)number(&operand, 1);
            if (opcode == LNE_SET_ADDRESS && bytes == 9) {
                m.address = number(&operand, 8);
            } else if (opcode == LNE_END_SEQUENCE) {
                good = !m.begun || add_row(lines, m.address, NO_FILE, 0);
                m = initial;
                reached = 0;
            }
        } else {
            switch (opcode) {
            case LNS_COPY:
                emit = true;
                break;
            case LNS_ADVANCE_PC:
                m.address += leb(&u->rest, false) * u->instruction_bytes;
                break;
            case LNS_ADVANCE_LINE:
                m.line += (uint32_t)leb(&u->rest, true);
                break;
            case LNS_SET_FILE:
                m.file = leb(&u->rest, false);
                break;
            case LNS_CONST_ADD_PC:
                m.address += (255 - u->opcode_base) / u->line_range *
                             u->instruction_bytes;
                break;
            case LNS_FIXED_ADVANCE_PC:
                m.address += number(&u->rest, 2);
                break;
            default:
                for (unsigned i = 0; i < u->operands[opcode]; i++) {
                    (void)leb(&u->rest, false);
                }
                break;
            }
        }
        if (emit && m.address >= reached) {
            good = add_row(lines, m.address,
                           u->first_file +
                               (m.file < MAX_FILES ? m.file : MAX_FILES),
                           m.line);
            reached = m.address;
            m.begun = true;
        }
    }
    return good && !u->rest.failed;
}

/* ---- the object ---------------------------------------------------------- */

/* The bytes of a section as they lie in the file; empty if it is not there. */
static span find_section(const uint8_t *file, size_t size, const char *name)
{
    Elf64_Ehdr header;
    Elf64_Shdr names, section;
    size_t length = strlen(name) + 1;

    memcpy(&header, file, sizeof header);
    uint64_t at = header.e_shoff + (uint64_t)header.e_shstrndx * sizeof names;
    if (header.e_shoff > size || !sim_within(at, sizeof names, size)) {
        return (span){file, file, false};
    }
    memcpy(&names, file + at, sizeof names);
    for (unsigned i = 0; i < header.e_shnum; i++) {
        at = header.e_shoff + i * sizeof section;
        if (!sim_within(at, sizeof section, size)) {
            break;
        }
        memcpy(&section, file + at, sizeof section);
        if (names.sh_offset <= size &&
            sim_within(names.sh_offset + section.sh_name, length, size) &&
            memcmp(file + names.sh_offset + section.sh_name, name, length) ==
                0 &&
            section.sh_type != SHT_NOBITS &&
            (section.sh_flags & SHF_COMPRESSED) == 0 &&
            sim_within(section.sh_offset, section.sh_size, size)) {
            const uint8_t *begin = file + section.sh_offset;
            return (span){begin, begin + section.sh_size, false};
        }
    }
    return (span){file, file, false};
}

sim_lines *sim_lines_read(const uint8_t *file, size_t size, uint64_t text,
                          uint64_t text_bytes)
{
    sections all = {
        .line = find_section(file, size, ".debug_line"),
        .line_str = find_section(file, size, ".debug_line_str"),
        .str = find_section(file, size, ".debug_str"),
    };
    sim_lines *lines = NULL;

    if (all.line.at != all.line.end) {
        lines = calloc(1, sizeof *lines);
    }
    if (lines == NULL) {
        return NULL;
    }
    lines->text = text;
    lines->text_bytes = text_bytes;
    while (all.line.at < all.line.end) {
        uint64_t bytes = number(&all.line, 4);
        unit u = {.rest = {all.line.at, NULL, false}};
        if (take(&all.line, bytes) == NULL) {
            break;
        }
        u.rest.end = all.line.at;
        if (read_header(lines, &u, &all)) {
            (void)run_program(lines, &u);
        }
    }
    if (lines->row_count == 0) {
        sim_lines_free(lines);
        return NULL;
    }
    qsort(lines->row, lines->row_count, sizeof lines->row[0], compare_rows);
    return lines;
}

void sim_lines_free(sim_lines *lines)
{
    if (lines != NULL) {
        for (size_t i = 0; i < lines->file_count; i++) {
            free(lines->file[i]);
        }
        free(lines->file);
        free(lines->row);
        free(lines);
    }
}

bool sim_lines_find(const sim_lines *lines, uint64_t text_offset,
                    const char **file, unsigned *line)
{
    size_t low = 0, high = lines != NULL ? lines->row_count : 0;

    while (low < high) { /* the first row beyond the offset */
        size_t middle = low + (high - low) / 2;
        if (lines->row[middle].offset > text_offset) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    if (low == 0 || lines->row[low - 1].line == 0) {
        return false;
    }
    *file = lines->file[lines->row[low - 1].file];
    *line = lines->row[low - 1].line;
    return true;
}

bool sim_lines_place(const sim_lines *lines, uint64_t text_offset, char *text,
                     size_t size)
{
    const char *file;
    unsigned line;

    text[0] = '\0';
    if (!sim_lines_find(lines, text_offset, &file, &line)) {
        return false;
    }
    const char *slash = strrchr(file, '/');
    (void)snprintf(text, size, "%s:%u", slash != NULL ? slash + 1 : file, line);
    return true;
}
