/* bundle.c: containers round a code object.
 *
 * An offload bundle is a list of (offset, size, triple); we take the AMD
 * entry that fits the simulated device best. Also the size of an image that
 * came as a bare pointer. The object itself is left to object.c.
 * Source: LLVM, ClangOffloadBundler documentation.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _DEFAULT_SOURCE /* mincore */
#include "object.h"
#include "report.h"

#include <elf.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char bundle_magic[] = "__CLANG_OFFLOAD_BUNDLE__";
enum {
    MAGIC_BYTES = sizeof bundle_magic - 1,
    ENTRY_BYTES = 24, /* offset, size, length of the triple */
    MAX_ENTRIES = 1024,
    MAX_TRIPLE = 256
};

static uint64_t read_u64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof value);
    return value;
}

/* How well a bundle entry fits: 0 not at all, higher is better. Best is gfx906
 * code that names the device's features, then what is built for either setting,
 * then what names the opposite, and at last what is for every gfx9 card. */
static int score_triple(const char *triple, bool runnable)
{
    const char *arch = strstr(triple, "gfx");

    if (strstr(triple, "amdgcn") == NULL || arch == NULL) {
        return 0;
    }
    if (strcmp(arch, "gfx9-generic") == 0 ||
        strncmp(arch, "gfx9-generic:", 13) == 0) {
        return 2;
    }
    if (strncmp(arch, "gfx906", 6) != 0 ||
        (arch[6] != '\0' && arch[6] != ':')) {
        return runnable ? 0 : 1;
    }
    return 7 + (strstr(arch, ":sramecc+") != NULL) +
           (strstr(arch, ":xnack-") != NULL) -
           2 * (strstr(arch, ":sramecc-") != NULL) -
           2 * (strstr(arch, ":xnack+") != NULL);
}

hipError_t sim_bundle_choose(const uint8_t **bytes, size_t *size, bool runnable)
{
    const uint8_t *file = *bytes;
    size_t limit = *size;
    uint64_t at = MAGIC_BYTES + 8;
    uint64_t best_offset = 0, best_size = 0, entries;
    int best = 0;
    char found[512] = "";

    if (limit >= 4 && memcmp(file, "CCOB", 4) == 0) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: compressed offload bundle, expected an "
                        "uncompressed one (-no-offload-compress)");
    }
    if (limit < at || memcmp(file, bundle_magic, MAGIC_BYTES) != 0) {
        return hipSuccess;
    }
    entries = read_u64(file + MAGIC_BYTES);
    if (entries > MAX_ENTRIES) {
        return sim_fail(hipErrorInvalidImage,
                        "offload bundle: %llu entries, expected at most %d",
                        (unsigned long long)entries, MAX_ENTRIES);
    }
    for (uint64_t i = 0; i < entries; i++) {
        if (!sim_within(at, ENTRY_BYTES, limit)) {
            return sim_fail(hipErrorInvalidImage,
                            "offload bundle: truncated in entry %llu",
                            (unsigned long long)i);
        }
        uint64_t offset = read_u64(file + at);
        uint64_t bytes_here = read_u64(file + at + 8);
        uint64_t length = read_u64(file + at + 16);
        at += ENTRY_BYTES;
        if (length >= MAX_TRIPLE || !sim_within(at, length, limit) ||
            !sim_within(offset, bytes_here, limit)) {
            return sim_fail(hipErrorInvalidImage,
                            "offload bundle: entry %llu reaches beyond the "
                            "file's %zu bytes",
                            (unsigned long long)i, limit);
        }
        char triple[MAX_TRIPLE];
        memcpy(triple, file + at, length);
        triple[length] = '\0';
        at += length;
        int score = bytes_here != 0 ? score_triple(triple, runnable) : 0;
        if (score > best) {
            best = score;
            best_offset = offset;
            best_size = bytes_here;
        }
        size_t used = strlen(found);
        (void)snprintf(found + used, sizeof found - used, "%s%s",
                       i != 0 ? ", " : "", triple);
    }
    if (best == 0) {
        return sim_fail(hipErrorNoBinaryForGpu,
                        "offload bundle: no entry for gfx906, found %s", found);
    }
    *bytes = file + best_offset;
    *size = (size_t)best_size;
    return hipSuccess;
}

/* Is every page of the range mapped? (It may still be unreadable; this is
 * about a truncated file in a heap block, whose headers promise more.) */
static bool is_mapped(const uint8_t *begin, uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t first = (uint64_t)(uintptr_t)begin & ~(page - 1);
    uint64_t last = (uint64_t)(uintptr_t)begin + bytes;
    unsigned char resident[256];

    for (uint64_t at = first; at < last; at += page * sizeof resident) {
        uint64_t chunk = last - at;
        if (chunk > page * sizeof resident) {
            chunk = page * sizeof resident;
        }
        if (mincore((void *)(uintptr_t)at, (size_t)chunk, resident) != 0) {
            return false;
        }
    }
    return true;
}

/* The end of the furthest of ELF header, tables and section contents. */
static uint64_t elf_extent(const uint8_t *image)
{
    Elf64_Ehdr header;
    uint64_t end = sizeof header;

    memcpy(&header, image, sizeof header);
    uint64_t sections = (uint64_t)header.e_shnum * sizeof(Elf64_Shdr);
    uint64_t segments = (uint64_t)header.e_phnum * sizeof(Elf64_Phdr);
    if (header.e_shoff > SIM_MAX_IMAGE || header.e_phoff > SIM_MAX_IMAGE) {
        return 0;
    }
    if (header.e_shoff + sections > end) {
        end = header.e_shoff + sections;
    }
    if (header.e_phoff + segments > end) {
        end = header.e_phoff + segments;
    }
    if (!is_mapped(image, end)) {
        return 0;
    }
    for (unsigned i = 0; i < header.e_phnum; i++) {
        Elf64_Phdr segment;
        memcpy(&segment, image + header.e_phoff + i * sizeof segment,
               sizeof segment);
        if (!sim_within(segment.p_offset, segment.p_filesz, SIM_MAX_IMAGE)) {
            return 0;
        }
        if (segment.p_offset + segment.p_filesz > end) {
            end = segment.p_offset + segment.p_filesz;
        }
    }
    for (unsigned i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr section;
        memcpy(&section, image + header.e_shoff + i * sizeof section,
               sizeof section);
        if (section.sh_type == SHT_NOBITS) {
            continue;
        }
        if (!sim_within(section.sh_offset, section.sh_size, SIM_MAX_IMAGE)) {
            return 0;
        }
        if (section.sh_offset + section.sh_size > end) {
            end = section.sh_offset + section.sh_size;
        }
    }
    return is_mapped(image, end) ? end : 0;
}

static uint64_t bundle_extent(const uint8_t *image)
{
    uint64_t at = MAGIC_BYTES + 8, end = at;
    uint64_t entries = read_u64(image + MAGIC_BYTES);

    if (entries > MAX_ENTRIES) {
        return 0;
    }
    for (uint64_t i = 0; i < entries; i++) {
        if (!is_mapped(image, at + ENTRY_BYTES)) {
            return 0;
        }
        uint64_t offset = read_u64(image + at);
        uint64_t bytes = read_u64(image + at + 8);
        uint64_t length = read_u64(image + at + 16);
        at += ENTRY_BYTES + length;
        if (length >= MAX_TRIPLE || !sim_within(offset, bytes, SIM_MAX_IMAGE)) {
            return 0;
        }
        if (offset + bytes > end) {
            end = offset + bytes;
        }
        if (at > end) {
            end = at;
        }
    }
    return is_mapped(image, end) ? end : 0;
}

size_t sim_image_size(const void *image)
{
    const uint8_t *bytes = image;

    if (!is_mapped(bytes, 4)) {
        return 0;
    }
    if (memcmp(bytes, ELFMAG, SELFMAG) == 0 &&
        is_mapped(bytes, sizeof(Elf64_Ehdr))) {
        return (size_t)elf_extent(bytes);
    }
    if (is_mapped(bytes, MAGIC_BYTES + 8) &&
        memcmp(bytes, bundle_magic, MAGIC_BYTES) == 0) {
        return (size_t)bundle_extent(bytes);
    }
    return 4; /* enough for the loader to say what it is not */
}
