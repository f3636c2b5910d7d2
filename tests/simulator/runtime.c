// SPDX-License-Identifier: Apache-2.0
// Stands in for the DSL's runtime library under a kernel's host code: a launch becomes a call back. One device, no CUDA.
#include <stdint.h>
#include <string.h>

typedef int (*launch_t)(const void *config, void **arguments);
static launch_t launch;
static int library, kernel;

void simulator_set_launch(launch_t function) { launch = function; }

int _cudaLaunchKernelEx(const void *config, void *function, void **arguments) {
    (void)function;
    return launch == 0 ? 1 : launch(config, arguments);
}

int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), void *error) {
    (void)error;
    if (*state != 0) return 0;
    int failed = init(state);
    return failed ? failed : load(state, 0);
}

void cuda_dialect_unload_library_once(void **state) { *state = 0; }

int _cudaLibraryLoadData(void **out, ...) { *out = &library; return 0; }
int _cudaLibraryGetKernel(void **out, void *from, const char *name) { (void)from; (void)name; *out = &kernel; return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return device != 0; }
int _cudaFuncSetAttribute(void *function, int attribute, int value) { (void)function; (void)attribute; (void)value; return 0; }
int _cudaKernelSetAttributeForDevice(void *function, int attribute, int value, int device) {
    (void)function; (void)attribute; (void)value;
    return device != 0;
}
// The shared memory that a CTA may ask for (attribute 97): what an H100 has.
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 97 ? 232448 : 0;
    return device != 0 || attribute != 97;
}
int _cuKernelGetAttribute(int *value, int attribute, void *function, int device) {
    (void)attribute; (void)function;
    *value = 0;
    return device != 0;
}
void CuteDSLRT_TVMFFISetRaisedCudaError(void *where, int code) { (void)where; (void)code; }
