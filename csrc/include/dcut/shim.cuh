// What device code needs of its compiler.  Under nvcc and NVRTC these are CUDA's own names; any other compiler must have
// included a header that provides them before.
#pragma once

#include "order.h"
#include "params.h"

#if defined(__CUDACC__)
// The dynamic shared memory of the block, 16-byte aligned.
#define DCUT_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#else
#define DCUT_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(simt::dyn_shared())
#endif
