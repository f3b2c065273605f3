/* A stand-in for the CUDA driver, where there is none: memory is "pinned" by mlock(2), as the kernel allows, and no more
 * than RLIMIT_MEMLOCK in all, whoever asks. As the driver, it refuses a thread without a context; there is one device.
 * Error codes are those of cuda.h. */
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>

static size_t locked;
static struct { void *address; size_t bytes; } pieces[64];
static char primary;
static __thread void *current;

int cuDeviceGet(int *device, int ordinal) {
    *device = 7; /* a handle is no ordinal */
    return ordinal == 0 ? 0 : 101; /* CUDA_ERROR_INVALID_DEVICE */
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &primary;
    return device == 7 ? 0 : 101;
}

int cuCtxSetCurrent(void *context) {
    current = context;
    return 0;
}

int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    struct rlimit limit;
    if (current != &primary) return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    if (flags != 1) return 1; /* CUDA_ERROR_INVALID_VALUE */
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY && locked + bytes > limit.rlim_cur) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    for (int i = 0; i < 64; i++)
        if (!pieces[i].address) {
            if (mlock(address, bytes)) return 2;
            pieces[i].address = address;
            pieces[i].bytes = bytes;
            locked += bytes;
            return 0;
        }
    return 2;
}

int cuMemHostUnregister(void *address) {
    if (current != &primary) return 201;
    for (int i = 0; i < 64; i++)
        if (pieces[i].address == address) {
            munlock(address, pieces[i].bytes);
            locked -= pieces[i].bytes;
            pieces[i].address = NULL;
            return 0;
        }
    return 713; /* CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED */
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 101 ? "CUDA_ERROR_INVALID_DEVICE"
          : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

size_t locked_bytes(void) { return locked; }

/* Whether all of these bytes lie in one piece that is pinned, as a copy by the device needs. */
int is_one_piece(char *address, size_t bytes) {
    for (int i = 0; i < 64; i++) {
        char *start = pieces[i].address;
        if (start && start <= address && address + bytes <= start + pieces[i].bytes) return 1;
    }
    return 0;
}
