/* decoder.c: fuzz target: the input is a kernel.
 *
 *   byte  0      check level; bit 4: portable code; bit 5: random wave order;
 *                bit 6: with a profile
 *         1      work-items of the workgroup, less one
 *         2..3   bytes of LDS, modulo 8 KiB
 *         4..5   bytes of private memory of a work-item, modulo 256
 *         6..9   what the low bits of rsrc1 and rsrc2 of the descriptor say
 *         10..11 kernel_code_properties
 *         12..   instruction words
 *
 * A prelude puts the address of a small buffer into s[8:9] and, for each lane,
 * into v[2:3], and a buffer descriptor of it into s[12:15], so that memory
 * instructions have somewhere to go. The rest is up to the words, for a small
 * budget of instructions.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "fuzz.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

enum {
    BUDGET = 1500,
    BUFFER_BYTES = 4096,
    HEADER_BYTES = 12,
    MAX_WORDS = 1024,
    TEXT = 4096 /* offset of the text, in the file and in memory */
};

/* The whole code object, as it lies in the file. */
typedef struct image {
    Elf64_Ehdr header;
    Elf64_Phdr segment[2];
    Elf64_Shdr section[3]; /* none, symbols, their names */
    Elf64_Sym symbol[2];
    char names[8];
    _Alignas(64) uint32_t descriptor[16];
    _Alignas(TEXT) uint32_t text[MAX_WORDS + 32];
} image;

_Static_assert(offsetof(image, text) == TEXT, "the text begins a page");

static uint32_t read_bytes(const uint8_t *at, unsigned bytes)
{
    uint32_t value = 0;

    memcpy(&value, at, bytes);
    return value;
}

/* Everything but descriptor and text. */
static void fill_file(image *to, size_t text_bytes)
{
    memset(to, 0, TEXT);
    to->header = (Elf64_Ehdr){
        .e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB,
                    EV_CURRENT, 0x40, 2},
        .e_type = ET_DYN,
        .e_machine = 0xe0,
        .e_flags = 0x2f,
        .e_phoff = offsetof(image, segment),
        .e_phentsize = sizeof(Elf64_Phdr),
        .e_phnum = 2,
        .e_shoff = offsetof(image, section),
        .e_shentsize = sizeof(Elf64_Shdr),
        .e_shnum = 3,
    };
    to->segment[0] = (Elf64_Phdr){
        .p_type = PT_LOAD, .p_flags = PF_R, .p_filesz = TEXT, .p_memsz = TEXT};
    to->segment[1] = (Elf64_Phdr){.p_type = PT_LOAD,
                                  .p_flags = PF_R | PF_X,
                                  .p_offset = TEXT,
                                  .p_vaddr = TEXT,
                                  .p_filesz = text_bytes,
                                  .p_memsz = text_bytes};
    to->section[1] = (Elf64_Shdr){.sh_type = SHT_DYNSYM,
                                  .sh_offset = offsetof(image, symbol),
                                  .sh_size = sizeof to->symbol,
                                  .sh_link = 2};
    to->section[2] = (Elf64_Shdr){.sh_type = SHT_STRTAB,
                                  .sh_offset = offsetof(image, names),
                                  .sh_size = sizeof to->names};
    memcpy(to->names, "\0k.kd", 6);
    to->symbol[1] = (Elf64_Sym){.st_name = 1,
                                .st_info = STT_OBJECT,
                                .st_shndx = 1,
                                .st_value = offsetof(image, descriptor),
                                .st_size = sizeof to->descriptor};
}

static void fill_descriptor(image *to, const uint8_t *data)
{
    uint32_t words = read_bytes(data + 6, 4);

    to->descriptor[0] = read_bytes(data + 2, 2) % 8192;
    to->descriptor[1] = read_bytes(data + 4, 2) % 256;
    to->descriptor[4] = TEXT - offsetof(image, descriptor);      /* entry */
    to->descriptor[12] = (words & 0xff0ff) | (words & 0xa00000); /* rsrc1 */
    to->descriptor[13] = (words >> 8 & 0x1fff);                  /* rsrc2 */
    to->descriptor[14] = read_bytes(data + 10, 2) | 8;
}

/* Prelude, the input's words, s_endpgm. Returns the bytes used. */
static size_t fill_text(image *to, uint64_t buffer, const uint8_t *words,
                        size_t count)
{
    const uint32_t prelude[] = {
        0xbe8800ff, (uint32_t)buffer,         /* s_mov_b32 s8 */
        0xbe8900ff, (uint32_t)(buffer >> 32), /* s_mov_b32 s9 */
        0xbe8c0008,                           /* s_mov_b32 s12, s8 */
        0x860dff09, 0xffff,                   /* s_and_b32 s13, s9 */
        0xbe8e00ff, BUFFER_BYTES,             /* s_mov_b32 s14 */
        0xbe8f00ff, 0x27000,                  /* s_mov_b32 s15 */
        0x24020082,                           /* v_lshlrev_b32 v1, 2, v0 */
        0x7e060209,                           /* v_mov_b32 v3, s9 */
        0x32040208,                           /* v_add_co_u32 v2, vcc, s8, v1 */
        0x38060680,                           /* v_addc_co_u32 v3, vcc, 0, v3 */
    };
    enum { BEFORE = sizeof prelude / sizeof prelude[0] };

    memcpy(to->text, prelude, sizeof prelude);
    memcpy(to->text + BEFORE, words, 4 * count);
    to->text[BEFORE + count] = 0xbf810000; /* s_endpgm */
    return 4 * (BEFORE + count + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static image file;
    static void *buffer;
    hipModule_t module;
    hipFunction_t function;
    char *text;

    if (bytes < HEADER_BYTES) {
        return 0;
    }
    if (buffer == NULL && hipMalloc(&buffer, BUFFER_BYTES) != hipSuccess) {
        abort();
    }
    size_t words = (bytes - HEADER_BYTES) / 4;
    (void)hipsimSetOption("threads", 1);
    (void)hipsimSetOption("budget", BUDGET);
    (void)hipsimSetOption("check", (data[0] & 15) % 3);
    (void)hipsimSetOption("cpu", (data[0] & 16) == 0);
    (void)hipsimSetOption("seed", (data[0] & 32) != 0);
    (void)hipsimSetOption("profile", (data[0] & 64) != 0);
    memset(buffer, 0x3c, BUFFER_BYTES); /* each half is near 1 */
    size_t text_bytes =
        fill_text(&file, (uint64_t)(uintptr_t)buffer, data + HEADER_BYTES,
                  words < MAX_WORDS ? words : MAX_WORDS);
    fill_file(&file, text_bytes);
    fill_descriptor(&file, data);
    if (hipsimDisassemble(&file, TEXT + text_bytes, NULL, &text) ==
        hipSuccess) {
        hipsimFree(text);
    }
    if (hipsimModuleLoad(&module, &file, TEXT + text_bytes) != hipSuccess ||
        hipModuleGetFunction(&function, module, "k") != hipSuccess) {
        abort(); /* the file is as it should be */
    }
    (void)hipModuleLaunchKernel(function, 2, 1, 1, data[1] + 1u, 1, 1, 0, NULL,
                                NULL, NULL);
    if ((data[0] & 64) != 0 && hipsimTakeProfile(&text) == hipSuccess) {
        hipsimFree(text);
    }
    return hipModuleUnload(module);
}
