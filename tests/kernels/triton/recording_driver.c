/* A CUDA driver that launches nothing and keeps what a launch was given; test_launch.py builds it as libcuda.so.1.

   Only what Triton's driver.c asks for. cuda.h comes with Triton. */
#include "cuda.h"
#include <string.h>

#define PARAMETERS 11 /* of each kernel here, before those of Triton itself */

unsigned long long recorded[PARAMETERS], recorded_stream;
unsigned recorded_grid[3], recorded_threads, recorded_shared, recorded_attributes;
int launches, pointers_looked_up;
int pointers; /* of the kernel that is launched next: the others have four bytes */
static int context;

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** parameters, void** extra) {
    (void)f, (void)extra;
    memset(recorded, 0, sizeof recorded);
    for (int i = 0; i < PARAMETERS; i++) memcpy(&recorded[i], parameters[i], i < pointers ? 8 : 4);
    recorded_grid[0] = config->gridDimX, recorded_grid[1] = config->gridDimY, recorded_grid[2] = config->gridDimZ;
    recorded_threads = config->blockDimX, recorded_shared = config->sharedMemBytes;
    recorded_attributes = config->numAttrs, recorded_stream = (unsigned long long)config->hStream;
    launches++;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    (void)attribute;
    pointers_looked_up++;
    *(CUdeviceptr*)data = pointer;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* found) { return *found = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext given) { return (void)given, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* found, CUlimit limit) { return (void)limit, *found = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t given) { return (void)limit, (void)given, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* found, int index) { return *found = index, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* found, CUdevice_attribute attribute, CUdevice device) {
    return (void)attribute, (void)device, *found = 232448, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) {
    return (void)device, *found = (CUcontext)&context, CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* found) { return *found = 13000, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* found, CUfunction_attribute attribute, CUfunction f) {
    return (void)f, *found = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int given) {
    return (void)f, (void)attribute, (void)given, CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache given) { return (void)f, (void)given, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) { return (void)error, *text = "", CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* found, const void* image) {
    return (void)image, *found = (CUmodule)&context, CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* found, CUmodule module, const char* name) {
    return (void)module, (void)name, *found = (CUfunction)&context, CUDA_SUCCESS;
}
