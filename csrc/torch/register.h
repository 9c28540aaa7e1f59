// What registers the operators of a backend in a namespace.
#pragma once

#include <torch/csrc/stable/library.h>

namespace dcut::binding {

void bind_cpu(torch::stable::detail::StableLibrary& m);
void bind_cuda(torch::stable::detail::StableLibrary& m);  // with DCUT_CUDA

}  // namespace dcut::binding
