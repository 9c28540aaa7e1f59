// The launchers of the CUDA kernels: one launch each, on any stream, without synchronization or allocation.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace dcut::gpu {

struct Where {
  int device;
  cudaStream_t stream;
};

cudaError_t launch_select_and_pack(const Rows& rows, const Scores& scores, const Tables& tables, const Tokens& tokens,
                                   const Packed& packed, const Decision& decision, Where where);
cudaError_t launch_log_prefix_sum(const Rows& rows, const Scores& scores, int32_t* prefix, Where where);
cudaError_t launch_segmented_topk(const Rows& rows, const Scores& scores, const Tables& tables, int32_t* keep,
                                  Where where);
cudaError_t launch_bucket_argmax(const Rows& rows, const Scores& scores, const Tables& tables, const Decision& decision,
                                 Where where);
cudaError_t launch_pack_prefixes(const Rows& rows, const int32_t* keep_lens, const Tokens& tokens, const Packed& packed,
                                 const Decision& decision, Where where);

}  // namespace dcut::gpu
