// tma.cuh: boxes of arrays copied to shared memory by the copy engine, and the barriers that say when
// they are there (sm_90 and up). Addresses of shared memory are 32-bit.
//
// A barrier completes a phase when `count` arrivals and all announced bytes are there. `wait(parity)`
// passes once the phase of that parity is complete: on a fresh barrier parity 1 passes at once.
#pragma once

#include "common/params.cuh"

__device__ inline void barrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// After the last `barrier_init`, before the __syncthreads that lets others use the barriers.
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrive and announce bytes. A box that sticks out of its array counts whole.
__device__ inline void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Copy a number of 4 bytes, or a zero. By one thread, without waiting for it.
__device__ inline void copy_number(unsigned to, const void* from, bool has) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(has ? 4 : 0)
               : "memory");
}
// An arrival of this thread once all that it has asked for so is there.
__device__ inline void barrier_arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Elements outside the array arrive as zeros. `x` is the innermost index.
__device__ inline void load_box(unsigned to, const TensorMap& map, unsigned barrier, int x, int y,
                                int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void load_box(unsigned to, const TensorMap& map, unsigned barrier, int x, int y,
                                int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}
__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A box to L2 only.
__device__ inline void prefetch_box(const TensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ inline void prefetch_to_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Writes of this thread to shared memory are seen by the copies, and by the warpgroup products, that
// are asked for after a barrier.
__device__ inline void publish_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Copy to global memory: both addresses and `bytes` are multiples of 16. Copies belong to the thread
// that asks for them.
__device__ inline void store_bytes(void* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's copies have read shared memory, or have ended.
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Barrier number 1 to 15 of `count` threads, whole warps.
__device__ inline void named_barrier(unsigned number, unsigned count) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(count) : "memory");
}

// Count towards such a barrier without waiting for it.
__device__ inline void named_arrive(unsigned number, unsigned count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(count) : "memory");
}

// Registers of each thread of a warpgroup from here on; all its warps call.
template <int kCount>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Byte offset in a tile of rows of 128 or 64 bytes at a 1024-byte boundary -> where the swizzle puts it.
template <int kRow = 128>
__device__ inline unsigned swizzled(unsigned offset) {
  static_assert(kRow == 128 || kRow == 64, "a swizzle of that span");
  return offset ^ (offset >> 3 & (kRow == 128 ? 0x70u : 0x30u));
}
