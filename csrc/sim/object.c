/* object.c: file bytes -> sim_object.
 *
 * Checks the ELF header, copies the loadable segments into one anonymous
 * mapping, applies the relative relocations, finds the kernels by their
 * "NAME.kd" symbols and parses their descriptors. The file is not trusted:
 * each offset and size is checked before it is used. Bundles are left to
 * bundle.c, the metadata note to metadata.c, instructions to decode.c.
 * Source: LLVM, User Guide for AMDGPU Backend, "ELF Code Object" and
 * "Kernel Descriptor".
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "object.h"
#include "report.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Names not in every <elf.h>. */
enum {
    MACHINE_AMDGPU = 0xe0,
    OSABI_AMDGPU_HSA = 0x40,
    VERSION_BASE = 2, /* e_ident[EI_ABIVERSION] 2 = version 4 */
    RELOC_NONE = 0,
    RELOC_RELATIVE64 = 13,
    NOTE_AMDGPU_METADATA = 32,
    DESCRIPTOR_BYTES = 64,
    IMAGE_ALIGN = 4096
};

typedef struct file_view {
    const uint8_t *bytes;
    size_t size;
} file_view;

/* Copies a table entry out of the file (which may be unaligned). */
static bool read_file(const file_view *file, uint64_t offset, void *to,
                      size_t bytes)
{
    if (!sim_within(offset, bytes, file->size)) {
        return false;
    }
    memcpy(to, file->bytes + offset, bytes);
    return true;
}

/* EF_AMDGPU_MACH values; the metadata's target is preferred where known. */
static const struct {
    uint8_t machine;
    const char *name;
} arch_names[] = {
    {0x2c, "gfx900"},          {0x2d, "gfx902"},
    {0x2e, "gfx904"},          {0x2f, "gfx906"},
    {0x30, "gfx908"},          {0x31, "gfx909"},
    {0x32, "gfx90c"},          {0x33, "gfx1010"},
    {0x34, "gfx1011"},         {0x35, "gfx1012"},
    {0x36, "gfx1030"},         {0x37, "gfx1031"},
    {0x38, "gfx1032"},         {0x39, "gfx1033"},
    {0x3d, "gfx1035"},         {0x3e, "gfx1034"},
    {0x3f, "gfx90a"},          {0x41, "gfx1100"},
    {0x42, "gfx1013"},         {0x43, "gfx1150"},
    {0x44, "gfx1103"},         {0x45, "gfx1036"},
    {0x46, "gfx1101"},         {0x47, "gfx1102"},
    {0x48, "gfx1200"},         {0x49, "gfx1250"},
    {0x4a, "gfx1151"},         {0x4c, "gfx942"},
    {0x4e, "gfx1201"},         {0x4f, "gfx950"},
    {0x51, "gfx9-generic"},    {0x52, "gfx10-1-generic"},
    {0x53, "gfx10-3-generic"}, {0x54, "gfx11-generic"},
    {0x55, "gfx1152"},         {0x58, "gfx1153"},
    {0x59, "gfx12-generic"},   {0x5f, "gfx9-4-generic"},
};

const char *sim_arch_name(uint32_t flags)
{
    for (size_t i = 0; i < sizeof arch_names / sizeof arch_names[0]; i++) {
        if (arch_names[i].machine == (flags & 0xff)) {
            return arch_names[i].name;
        }
    }
    return "unknown";
}

static hipError_t check_header(const file_view *file, bool runnable,
                               Elf64_Ehdr *header)
{
    if (!read_file(file, 0, header, sizeof *header)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: %zu bytes, expected at least the %zu "
                        "of an ELF header",
                        file->size, sizeof *header);
    }
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_ident[EI_CLASS] != ELFCLASS64 ||
        header->e_ident[EI_DATA] != ELFDATA2LSB) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: expected a 64-bit little-endian ELF "
                        "file or an offload bundle, found bytes %02x %02x "
                        "%02x %02x",
                        header->e_ident[0], header->e_ident[1],
                        header->e_ident[2], header->e_ident[3]);
    }
    if (header->e_machine != MACHINE_AMDGPU) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: ELF machine 0x%x, expected 0x%x "
                        "(AMDGPU)",
                        header->e_machine, MACHINE_AMDGPU);
    }
    unsigned version = header->e_ident[EI_ABIVERSION];
    if (header->e_ident[EI_OSABI] != OSABI_AMDGPU_HSA || version < 2 ||
        version > 4) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: OS/ABI 0x%x with version byte %u, "
                        "expected 0x%x with 2 to 4 (code object v4 to v6)",
                        header->e_ident[EI_OSABI], version, OSABI_AMDGPU_HSA);
    }
    if (header->e_type != ET_DYN || header->e_phentsize != sizeof(Elf64_Phdr) ||
        header->e_shentsize != sizeof(Elf64_Shdr)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: ELF type %u, header sizes %u and %u, "
                        "expected a linked object (3, 56, 64)",
                        header->e_type, header->e_phentsize,
                        header->e_shentsize);
    }
    if (!runnable) {
        return hipSuccess;
    }
    /* XNACK and SRAMECC may be set either way: no load is ever replayed here,
     * and 16-bit loads keep the other half, as code for SRAMECC off expects. */
    if (!sim_arch_runs(header->e_flags)) {
        return sim_fail(hipErrorNoBinaryForGpu,
                        "code object: built for %s (machine 0x%x), expected "
                        "gfx906 (machine 0x2f) or gfx9-generic",
                        sim_arch_name(header->e_flags), header->e_flags & 0xff);
    }
    return hipSuccess;
}

/* Checks one PT_LOAD against the file and the one before it. */
static hipError_t check_segment(const file_view *file, const Elf64_Phdr *load,
                                uint64_t reached)
{
    if (load->p_filesz > load->p_memsz ||
        !sim_within(load->p_offset, load->p_filesz, file->size)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: segment of 0x%llx bytes at file offset "
                        "0x%llx reaches beyond the file's %zu bytes",
                        (unsigned long long)load->p_filesz,
                        (unsigned long long)load->p_offset, file->size);
    }
    if (!sim_within(load->p_vaddr, load->p_memsz, SIM_MAX_IMAGE)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: segment of 0x%llx bytes at address "
                        "0x%llx, expected an image of at most 0x%x bytes",
                        (unsigned long long)load->p_memsz,
                        (unsigned long long)load->p_vaddr, SIM_MAX_IMAGE);
    }
    if (load->p_vaddr < reached) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: segment at address 0x%llx overlaps the "
                        "one before, which ends at 0x%llx",
                        (unsigned long long)load->p_vaddr,
                        (unsigned long long)reached);
    }
    return hipSuccess;
}

static hipError_t load_segments(sim_object *object, const file_view *file,
                                const Elf64_Ehdr *header)
{
    Elf64_Phdr load[SIM_MAX_SEGMENTS];
    size_t loads = 0;
    uint64_t reached = 0;

    for (unsigned i = 0; i < header->e_phnum; i++) {
        Elf64_Phdr next;
        if (header->e_phoff > file->size ||
            !read_file(file, header->e_phoff + i * sizeof next, &next,
                       sizeof next)) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: truncated, program header %u lies "
                            "beyond the file's %zu bytes",
                            i, file->size);
        }
        if (next.p_type != PT_LOAD || next.p_memsz == 0) {
            continue;
        }
        hipError_t status = check_segment(file, &next, reached);
        if (status != hipSuccess) {
            return status;
        }
        if (loads == SIM_MAX_SEGMENTS) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: more than %d segments",
                            SIM_MAX_SEGMENTS);
        }
        reached = next.p_vaddr + next.p_memsz;
        load[loads++] = next;
    }
    if (loads == 0) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: no loadable segment");
    }
    object->image_bytes =
        (size_t)(reached + IMAGE_ALIGN - 1) / IMAGE_ALIGN * IMAGE_ALIGN;
    void *image = mmap(NULL, object->image_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (image == MAP_FAILED) {
        return sim_fail(hipErrorOutOfMemory,
                        "code object: no memory for an image of %zu bytes",
                        object->image_bytes);
    }
    object->image = image;
    for (size_t i = 0; i < loads; i++) {
        uint64_t begin = (uint64_t)(uintptr_t)image + load[i].p_vaddr;
        memcpy(object->image + load[i].p_vaddr, file->bytes + load[i].p_offset,
               (size_t)load[i].p_filesz);
        object->segment[object->segment_count++] = (sim_region){
            begin, begin + load[i].p_memsz,
            load[i].p_flags & PF_W ? SIM_READ | SIM_WRITE : SIM_READ};
        if ((load[i].p_flags & PF_X) == 0) {
            continue;
        }
        if (object->text_bytes != 0 || (load[i].p_flags & PF_W) != 0 ||
            load[i].p_filesz != load[i].p_memsz || load[i].p_vaddr % 4 != 0) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: expected one executable segment, "
                            "not writable, wholly in the file and at a "
                            "multiple of 4");
        }
        object->text = load[i].p_vaddr;
        object->text_bytes = load[i].p_memsz;
    }
    return hipSuccess;
}

/* *at = *at's addend + load address, for each word that holds an address. */
static hipError_t relocate(sim_object *object, const file_view *file,
                           const Elf64_Shdr *section)
{
    for (uint64_t at = 0; at + sizeof(Elf64_Rela) <= section->sh_size;
         at += sizeof(Elf64_Rela)) {
        Elf64_Rela entry;
        if (!read_file(file, section->sh_offset + at, &entry, sizeof entry)) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: truncated relocation section");
        }
        uint64_t type = ELF64_R_TYPE(entry.r_info);
        if (type == RELOC_NONE) {
            continue;
        }
        if (type != RELOC_RELATIVE64 ||
            !sim_within(entry.r_offset, 8, object->image_bytes)) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: relocation type %llu at 0x%llx, "
                            "expected type %d (relative, 64 bit) within the "
                            "image",
                            (unsigned long long)type,
                            (unsigned long long)entry.r_offset,
                            RELOC_RELATIVE64);
        }
        uint64_t value =
            (uint64_t)(uintptr_t)object->image + (uint64_t)entry.r_addend;
        memcpy(object->image + entry.r_offset, &value, sizeof value);
    }
    return hipSuccess;
}

/* The kernel descriptor at `at` in the image. */
static hipError_t parse_descriptor(const sim_object *object, uint64_t at,
                                   sim_kernel *kernel)
{
    const uint8_t *raw = object->image + at;
    sim_descriptor *d = &kernel->descriptor;

    memcpy(&d->lds_bytes, raw, 4);
    memcpy(&d->private_bytes, raw + 4, 4);
    memcpy(&d->kernarg_bytes, raw + 8, 4);
    memcpy(&d->entry_offset, raw + 16, 8);
    memcpy(&d->rsrc3, raw + 44, 4);
    memcpy(&d->rsrc1, raw + 48, 4);
    memcpy(&d->rsrc2, raw + 52, 4);
    memcpy(&d->properties, raw + 56, 2);
    kernel->descriptor_at = at;
    kernel->entry = at + (uint64_t)d->entry_offset; /* may wrap; checked */
    kernel->kernarg_bytes = d->kernarg_bytes;
    if (kernel->entry < object->text || kernel->entry % 4 != 0 ||
        !sim_within(kernel->entry - object->text, 4, object->text_bytes)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: kernel %s: entry 0x%llx is not in the "
                        "text at 0x%llx, 0x%llx bytes",
                        kernel->name, (unsigned long long)kernel->entry,
                        (unsigned long long)object->text,
                        (unsigned long long)object->text_bytes);
    }
    if (d->kernarg_bytes > SIM_MAX_KERNARG) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: kernel %s: %u bytes of arguments, "
                        "expected at most %d",
                        kernel->name, d->kernarg_bytes, SIM_MAX_KERNARG);
    }
    kernel->code_bytes = object->text + object->text_bytes - kernel->entry;
    return hipSuccess;
}

/* Adds a kernel for the symbol NAME.kd. */
static hipError_t add_kernel(sim_object *object, const Elf64_Sym *symbol,
                             const char *name, size_t length)
{
    sim_kernel *kernel = &object->kernel[object->kernel_count];

    if (object->kernel_count == SIM_MAX_KERNELS ||
        !sim_within(symbol->st_value, DESCRIPTOR_BYTES, object->image_bytes)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: kernel descriptor %s at 0x%llx: beyond "
                        "the image, or more than %d kernels",
                        name, (unsigned long long)symbol->st_value,
                        SIM_MAX_KERNELS);
    }
    kernel->name = strndup(name, length - 3);
    if (kernel->name == NULL) {
        return sim_fail(hipErrorOutOfMemory, "code object: out of memory");
    }
    bool twice = sim_object_find(object, kernel->name) != NULL;
    object->kernel_count++;
    return twice
               ? sim_fail(hipErrorInvalidImage,
                          "code object: kernel %s is there twice", kernel->name)
               : parse_descriptor(object, symbol->st_value, kernel);
}

static void note_code_size(sim_object *object, const Elf64_Sym *symbol)
{
    for (size_t i = 0; i < object->kernel_count; i++) {
        sim_kernel *kernel = &object->kernel[i];
        if (kernel->entry == symbol->st_value && symbol->st_size != 0 &&
            symbol->st_size < kernel->code_bytes) {
            kernel->code_bytes = symbol->st_size;
        }
    }
}

static hipError_t read_symbols(sim_object *object, const file_view *file,
                               const Elf64_Shdr *section,
                               const Elf64_Shdr *strings)
{
    uint64_t count = section->sh_size / sizeof(Elf64_Sym);

    if (!sim_within(section->sh_offset, section->sh_size, file->size) ||
        !sim_within(strings->sh_offset, strings->sh_size, file->size) ||
        count > SIM_MAX_SYMBOLS || object->kernel != NULL) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: symbol table of %llu entries lies "
                        "beyond the file, or there are two",
                        (unsigned long long)count);
    }
    object->kernel = calloc(SIM_MAX_KERNELS, sizeof object->kernel[0]);
    if (object->kernel == NULL) {
        return sim_fail(hipErrorOutOfMemory, "code object: out of memory");
    }
    for (int pass = 0; pass < 2; pass++) { /* kernels, then their sizes */
        for (uint64_t i = 0; i < count; i++) {
            Elf64_Sym symbol;
            (void)read_file(file, section->sh_offset + i * sizeof symbol,
                            &symbol, sizeof symbol);
            unsigned type = ELF64_ST_TYPE(symbol.st_info);
            if (pass == 1 && type == STT_FUNC) {
                note_code_size(object, &symbol);
            }
            if (pass == 1 || type != STT_OBJECT ||
                symbol.st_shndx == SHN_UNDEF ||
                symbol.st_name >= strings->sh_size) {
                continue;
            }
            const char *name =
                (const char *)file->bytes + strings->sh_offset + symbol.st_name;
            size_t room = (size_t)(strings->sh_size - symbol.st_name);
            size_t length = strnlen(name, room);
            if (length == room || length <= 3 ||
                memcmp(name + length - 3, ".kd", 3) != 0) {
                continue;
            }
            hipError_t status = add_kernel(object, &symbol, name, length);
            if (status != hipSuccess) {
                return status;
            }
        }
    }
    return hipSuccess;
}

/* Relocations and dynamic symbols, found by the section headers as the
 * vendor's loader finds them. */
static hipError_t read_sections(sim_object *object, const file_view *file,
                                const Elf64_Ehdr *header)
{
    for (unsigned i = 0; i < header->e_shnum; i++) {
        Elf64_Shdr section, strings;
        hipError_t status = hipSuccess;
        if (header->e_shoff > file->size ||
            !read_file(file, header->e_shoff + i * sizeof section, &section,
                       sizeof section)) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: truncated, section header %u lies "
                            "beyond the file's %zu bytes",
                            i, file->size);
        }
        if (section.sh_type == SHT_RELA &&
            (section.sh_flags & SHF_ALLOC) != 0) {
            status = relocate(object, file, &section);
        } else if (section.sh_type == SHT_DYNSYM) {
            if (section.sh_link >= header->e_shnum ||
                !read_file(file,
                           header->e_shoff + section.sh_link * sizeof strings,
                           &strings, sizeof strings)) {
                return sim_fail(hipErrorInvalidImage,
                                "code object: symbol names in section %u of "
                                "%u",
                                section.sh_link, header->e_shnum);
            }
            status = read_symbols(object, file, &section, &strings);
        }
        if (status != hipSuccess) {
            return status;
        }
    }
    return hipSuccess;
}

/* The AMDGPU metadata note among the notes at [offset, offset + bytes). */
static hipError_t read_notes(sim_object *object, const file_view *file,
                             uint64_t offset, uint64_t bytes)
{
    uint64_t at = offset, end = offset + bytes;

    if (!sim_within(offset, bytes, file->size)) {
        return sim_fail(hipErrorInvalidImage,
                        "code object: note segment lies beyond the file");
    }
    while (sim_within(at, sizeof(Elf64_Nhdr), end)) {
        Elf64_Nhdr note;
        (void)read_file(file, at, &note, sizeof note);
        uint64_t name = at + sizeof note;
        uint64_t text = name + ((uint64_t)note.n_namesz + 3) / 4 * 4;
        if (!sim_within(text, note.n_descsz, end)) {
            return sim_fail(hipErrorInvalidImage,
                            "code object: note of %u bytes reaches beyond "
                            "its segment",
                            note.n_descsz);
        }
        if (note.n_type == NOTE_AMDGPU_METADATA && note.n_namesz == 7 &&
            memcmp(file->bytes + name, "AMDGPU", 7) == 0) {
            /* One per object file that was linked (-fgpu-rdc, LTO). */
            hipError_t status =
                sim_metadata_read(object, file->bytes + text, note.n_descsz);
            if (status != hipSuccess) {
                return status;
            }
        }
        at = text + ((uint64_t)note.n_descsz + 3) / 4 * 4;
    }
    return hipSuccess;
}

static hipError_t read_note_segments(sim_object *object, const file_view *file,
                                     const Elf64_Ehdr *header)
{
    for (unsigned i = 0; i < header->e_phnum; i++) {
        Elf64_Phdr segment; /* load_segments has seen them all */
        (void)read_file(file, header->e_phoff + i * sizeof segment, &segment,
                        sizeof segment);
        if (segment.p_type == PT_NOTE) {
            hipError_t status =
                read_notes(object, file, segment.p_offset, segment.p_filesz);
            if (status != hipSuccess) {
                return status;
            }
        }
    }
    return hipSuccess;
}

hipError_t sim_object_load(const void *bytes, size_t size, bool runnable,
                           sim_object **out)
{
    const uint8_t *chosen = bytes;
    sim_object *object = NULL;
    Elf64_Ehdr header;

    *out = NULL;
    hipError_t status = sim_bundle_choose(&chosen, &size, runnable);
    const file_view file = {chosen, size};
    if (status == hipSuccess) {
        status = check_header(&file, runnable, &header);
    }
    if (status != hipSuccess) {
        return status;
    }
    object = calloc(1, sizeof *object);
    if (object == NULL) {
        return sim_fail(hipErrorOutOfMemory, "code object: out of memory");
    }
    object->flags = header.e_flags;
    object->version = header.e_ident[EI_ABIVERSION] + VERSION_BASE;
    status = load_segments(object, &file, &header);
    if (status == hipSuccess) {
        status = read_sections(object, &file, &header);
    }
    if (status == hipSuccess) {
        status = read_note_segments(object, &file, &header);
    }
    if (status != hipSuccess) {
        sim_object_free(object);
        return status;
    }
    object->lines =
        sim_lines_read(file.bytes, file.size, object->text, object->text_bytes);
    *out = object;
    return hipSuccess;
}

void sim_object_free(sim_object *object)
{
    if (object == NULL) {
        return;
    }
    for (size_t k = 0; k < object->kernel_count; k++) {
        sim_kernel *kernel = &object->kernel[k];
        for (size_t a = 0; a < kernel->arg_count; a++) {
            free(kernel->arg[a].name);
            free(kernel->arg[a].kind);
        }
        free(kernel->arg);
        free(kernel->name);
    }
    free(object->kernel);
    sim_lines_free(object->lines);
    if (object->image != NULL) {
        (void)munmap(object->image, object->image_bytes);
    }
    free(object);
}

const sim_kernel *sim_object_find(const sim_object *object, const char *name)
{
    for (size_t i = 0; i < object->kernel_count; i++) {
        if (strcmp(object->kernel[i].name, name) == 0) {
            return &object->kernel[i];
        }
    }
    return NULL;
}
