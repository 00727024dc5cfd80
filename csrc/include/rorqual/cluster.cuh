// cluster.cuh: what the CTAs of a thread block cluster tell each other.
#pragma once
#include <cstdint>

namespace rorqual {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
// A barrier of all threads of all CTAs of the cluster; what was written to shared memory before it is visible after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address, in the cluster's window, of another CTA's copy of an address in our own shared memory.
__device__ __forceinline__ uint32_t cluster_addr(uint32_t smem_addr, uint32_t rank) {
  uint32_t addr;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(addr) : "r"(smem_addr), "r"(rank));
  return addr;
}
__device__ __forceinline__ float4 cluster_load(uint32_t addr) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}

}  // namespace rorqual
