/* A stand-in for NVML, which tells torch the number of devices without initialising CUDA: there is one. */
int nvmlInit(void) { return 0; }

int nvmlDeviceGetCount_v2(int *count) {
    *count = 1;
    return 0;
}
