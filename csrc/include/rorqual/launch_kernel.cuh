// launch_kernel.cuh: launches beyond <<<>>>, and what dependent kernels tell each other.
#pragma once
#include <cuda_runtime.h>

namespace rorqual {

// Programmatic dependent launch: the next kernel of the stream, if it was launched with `overlaps`, may be set up
// from here on; it waits itself for this kernel's end (all its writes visible) before it reads them.
__device__ __forceinline__ void let_dependents_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

struct LaunchOptions {
  int smem_bytes = 0;
  bool overlaps = false;  // calls wait_for_previous_kernel() before it reads what the previous kernel wrote
  int cluster = 1;        // CTAs, consecutive in x, that reach each other's shared memory
};

template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, cudaStream_t stream,
                          const LaunchOptions& options, const Args&... args) {
  if (options.smem_bytes > 48 << 10) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, options.smem_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = options.smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (options.overlaps) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (options.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = options.cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace rorqual
