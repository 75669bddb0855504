/* A CUDA driver that checks what it is asked and runs nothing: see stub_cuda.py.

   Errors are those of the driver API's documentation. Everything in device memory is a pointer of
   the host here, and is never read. */
#include "cuda.h"
#include <stdint.h>
#include <string.h>

/* Set by stub_cuda.py: the chip, and the most shared memory that a program may ask for. */
int stub_arch = 90, stub_shared = 232448, stub_multiprocessors = 132;

/* What was launched since stub_launches was last set to 0, the first ones. */
typedef struct {
  char kernel[64];
  unsigned grid[3], threads, shared;
} Launch;
#define KEPT 4096
Launch stub_launched[KEPT];
int stub_launches, stub_tensor_maps;

/* A module is its only kernel. */
typedef struct {
  char name[64];
  int shared;
} Function;
static Function functions[KEPT];
static int loaded;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int i) { *device = i; return i ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) { *clusters = 1; return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **text) {
  switch (error) {
  case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
  case CUDA_ERROR_NO_BINARY_FOR_GPU: *text = "no kernel image is available for execution on the device"; break;
  case CUDA_ERROR_INVALID_IMAGE: *text = "device kernel image is invalid"; break;
  case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: *text = "too many resources requested for launch"; break;
  default: *text = "error of the stub driver";
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
  return CUDA_ERROR_INVALID_VALUE; /* only a host pointer is asked about in this way */
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = stub_arch / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = stub_arch % 10; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = stub_multiprocessors; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = stub_shared; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = stub_shared + 1024; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 6144; break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

/* A cubin is an ELF file of machine 190 that names its chip in its flags: in the lowest byte, in
   files of ABI version 8 and later in the next. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  const uint8_t *elf = image;
  if (memcmp(elf, "\177ELF", 4) || elf[18] != 190)
    return CUDA_ERROR_INVALID_IMAGE;
  if (elf[elf[8] >= 8 ? 49 : 48] != stub_arch)
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *module = (CUmodule)&functions[loaded++ % KEPT];
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *found = (Function *)module;
  strncpy(found->name, name, sizeof found->name - 1);
  found->shared = 49152;
  *function = (CUfunction)found;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
    return CUDA_SUCCESS;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > stub_shared)
    return CUDA_ERROR_INVALID_VALUE;
  ((Function *)function)->shared = value;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                                CUtensorMapFloatOOBfill fill) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* by type, in bytes */
  if (stub_arch < 90 || (uintptr_t)map % 64 || (uintptr_t)address % 16 || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  if ((unsigned)type >= sizeof sizes / sizeof *sizes || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE)
    return CUDA_ERROR_INVALID_VALUE; /* of what Triton asks for */
  for (cuuint32_t i = 0; i < rank; i++) {
    if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8)
      return CUDA_ERROR_INVALID_VALUE;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40))
      return CUDA_ERROR_INVALID_VALUE;
  }
  cuuint32_t inner = box[0] * sizes[type];
  if (inner % 16 || (swizzle && swizzle <= CU_TENSOR_MAP_SWIZZLE_128B && inner > 16u << swizzle))
    return CUDA_ERROR_INVALID_VALUE;
  stub_tensor_maps++;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  Function *kernel = (Function *)function;
  const unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
    return CUDA_ERROR_INVALID_VALUE;
  if (!threads || threads > 1024 || config->blockDimZ > 64)
    return CUDA_ERROR_INVALID_VALUE;
  if (config->sharedMemBytes > (unsigned)kernel->shared)
    return CUDA_ERROR_INVALID_VALUE; /* more than 48 kB must be asked for with cuFuncSetAttribute */
  if (stub_launches < KEPT) {
    Launch *launch = &stub_launched[stub_launches];
    memcpy(launch->kernel, kernel->name, sizeof launch->kernel);
    memcpy(launch->grid, grid, sizeof grid);
    launch->threads = threads;
    launch->shared = config->sharedMemBytes;
  }
  stub_launches++;
  return CUDA_SUCCESS;
}
