// The CUDA kernels with the launch shape that they have on a GPU, executed by the emulation.
#pragma once

#include "dcut/params.h"
#include "runtime.h"

namespace dcut::simt {

struct Device {
  Config config;
  uint32_t shared_limit = 227 * 1024;  // bytes of shared memory that a block can ask for
  int32_t cluster = 8;                 // blocks of a cluster; 1 before sm_90
};

Result select_and_pack(const Device& device, const Rows& rows, const Scores& scores, const Tables& tables,
                       const Tokens& tokens, const Packed& packed, const Decision& decision);
Result log_prefix_sum(const Device& device, const Rows& rows, const Scores& scores, int32_t* prefix);
Result segmented_topk(const Device& device, const Rows& rows, const Scores& scores, const Tables& tables,
                      int32_t* keep);
Result bucket_argmax(const Device& device, const Rows& rows, const Scores& scores, const Tables& tables,
                     const Decision& decision);
Result pack_prefixes(const Device& device, const Rows& rows, const int32_t* keep_lens, const Tokens& tokens,
                     const Packed& packed, const Decision& decision);

}  // namespace dcut::simt
