/* replay.c: runs a fuzz target on files, without libFuzzer.
 *
 *   replay FILE...
 *
 * Names each file before it runs, so that after a crash the last one is it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>

/* A buffer of exactly the file's size, for tools that watch its end. */
static uint8_t *read_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = NULL;
    long size = -1;

    if (file == NULL) {
        return NULL;
    }
    if (fseek(file, 0, SEEK_END) == 0) {
        size = ftell(file);
    }
    if (size >= 0 && fseek(file, 0, SEEK_SET) == 0) {
        data = malloc(size != 0 ? (size_t)size : 1);
    }
    if (data != NULL && fread(data, 1, (size_t)size, file) != (size_t)size) {
        free(data);
        data = NULL;
    }
    (void)fclose(file);
    *bytes = (size_t)size;
    return data;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        size_t bytes;
        uint8_t *data = read_file(argv[i], &bytes);
        if (data == NULL) {
            (void)fprintf(stderr, "%s: cannot be read\n", argv[i]);
            return 2;
        }
        (void)printf("%s\n", argv[i]);
        (void)fflush(stdout);
        (void)LLVMFuzzerTestOneInput(data, bytes);
        free(data);
    }
    return 0;
}
