// tma.cuh: mbarriers and bulk tensor copies into shared memory.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace rorqual {

__device__ __forceinline__ uint32_t smem_addr(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; a barrier among the threads must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(smem_addr(barrier))
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(
                   smem_addr(barrier)),
               "r"(num_bytes)
               : "memory");
}
// Waits until the phase with this parity has completed. A fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  const uint32_t addr = smem_addr(barrier);
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra wait_done;\n"
      "bra wait_loop;\n"
      "wait_done:\n}" ::"r"(addr),
      "r"(parity)
      : "memory");
}

// Orders this thread's ordinary shared-memory writes before later reads by wgmma or the copy engine;
// a barrier among the threads must follow.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies the map's box at (x, y, z), x fastest, to `dst`; completes `barrier` by the box's bytes.
__device__ __forceinline__ void tma_load_3d(void* dst, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// The same in four dimensions.
__device__ __forceinline__ void tma_load_4d(void* dst, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                                            int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// Copies num_bytes (a multiple of 16; both addresses too) to `dst`; completes `barrier` by them.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
                   smem_addr(dst)),
               "l"(src), "r"(smem_addr(barrier)), "r"(num_bytes)
               : "memory");
}

// How L2 shall treat what is read: as usual, or as the first to go (it will not be read again).
inline constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12f0000000000000;
__device__ __forceinline__ void tma_load_5d(void* dst, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                                            int c2, int c3, int c4, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(l2_policy)
      : "memory");
}

// A thread's own asynchronous copies of 16 bytes, or of zeros where `src` is not to be read.
__device__ __forceinline__ void copy_async_16(void* dst, const void* src, bool read) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src), "r"(read ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace rorqual
