/* A stand-in for the CUDA driver, where there is none: it has no device, and notes each of its functions that is called,
 * as a line "PROCESS FUNCTION" at the end of the file named by CUDA_STAND_IN_LOG. The CUDA runtime looks its functions up
 * with cuGetProcAddress. Error codes are those of cuda.h. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *function) {
    char line[128];
    int size = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), function);
    int file = open(getenv("CUDA_STAND_IN_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file < 0 || write(file, line, size) != size) abort(); /* a call that is lost would be a test that proves nothing */
    close(file);
}

int cuInit(unsigned flags) {
    (void)flags;
    note("cuInit");
    return 100; /* CUDA_ERROR_NO_DEVICE */
}

int cuDriverGetVersion(int *version) {
    note("cuDriverGetVersion");
    *version = 13000;
    return 0;
}

static int any_other(void) {
    note("another function");
    return 801; /* CUDA_ERROR_NOT_SUPPORTED */
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status) {
    (void)version, (void)flags;
    *function = !strcmp(name, "cuInit") ? (void *)cuInit
              : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
              : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2
                                                  : (void *)any_other;
    if (status) *status = 0;
    return 0;
}
