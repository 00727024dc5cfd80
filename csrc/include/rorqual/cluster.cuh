// cluster.cuh: launches beyond <<<>>>, and what CTAs of a cluster, or dependent kernels, tell each other.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "rorqual/tma.cuh"

namespace rorqual {

__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all CTAs of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives on the barrier at the same place in CTA `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_addr(barrier)),
      "r"(rank)
      : "memory");
}
// As tma_load_3d, into the same place in every CTA of `cta_mask`; completes the barrier in each of them.
__device__ __forceinline__ void tma_load_3d_multicast(void* dst, const CUtensorMap* map, uint64_t* barrier, int x,
                                                      int y, int z, uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "r"(z), "h"(cta_mask)
      : "memory");
}

// Programmatic dependent launch: the next kernel of the stream, if it was launched with `overlaps`, may be set up
// from here on; it waits itself for this kernel's end (all its writes visible) before it reads them.
__device__ __forceinline__ void let_dependents_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

struct LaunchOptions {
  int smem_bytes = 0;
  int cluster_x = 1;
  bool overlaps = false;  // calls wait_for_previous_kernel() before it reads what the previous kernel wrote
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
  if (options.cluster_x > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = options.cluster_x;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  if (options.overlaps) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace rorqual
