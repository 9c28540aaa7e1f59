// The Python module _simt: the kernels of kernels.h on addresses of the structs of params.h.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace py = pybind11;
using namespace py::literals;

namespace dcut::simt {
namespace {

Device device;
Stats last;  // of the last launch

template <class T>
const T& at(std::uintptr_t address) {
  return *reinterpret_cast<const T*>(address);
}

int32_t* integers(std::uintptr_t address) { return reinterpret_cast<int32_t*>(address); }

void finish(const Result& result) {
  last = result.stats;
  if (!result.error.empty()) throw std::runtime_error(result.error);
}

Schedule schedule_of(const std::string& name) {
  if (name == "forward") return Schedule::kForward;
  if (name == "reverse") return Schedule::kReverse;
  if (name == "shuffled") return Schedule::kShuffled;
  throw std::invalid_argument("schedule: expected forward, reverse or shuffled, got " + name);
}

py::dict stats() {
  return py::dict("barriers"_a = last.barriers, "warp_ops"_a = last.warp_ops, "longest_warp"_a = last.longest_warp,
                  "shared_requests"_a = last.shared_requests, "atomics"_a = last.atomics, "switches"_a = last.switches);
}

}  // namespace

PYBIND11_MODULE(_simt, m) {
  using Address = std::uintptr_t;
  m.doc() = "The CUDA kernels executed on the CPU, for tests.";
  m.attr("instrumented") = instrumented();
  m.def(
      "configure",
      [](const std::string& schedule, uint64_t seed, unsigned char fill, uint32_t shared_limit, int32_t cluster) {
        device = {{schedule_of(schedule), seed, fill}, shared_limit, cluster};
      },
      "schedule"_a = "forward", "seed"_a = 0, "fill"_a = Config().fill, "shared_limit"_a = Device().shared_limit,
      "cluster"_a = Device().cluster, "Set how the next launches run.");
  m.def("stats", stats, "Return what the last launch counted.");
  m.def("select_and_pack",
        [](Address rows, Address scores, Address tables, Address tokens, Address packed, Address decision) {
          finish(select_and_pack(device, at<Rows>(rows), at<Scores>(scores), at<Tables>(tables), at<Tokens>(tokens),
                                 at<Packed>(packed), at<Decision>(decision)));
        });
  m.def("log_prefix_sum", [](Address rows, Address scores, Address prefix) {
    finish(log_prefix_sum(device, at<Rows>(rows), at<Scores>(scores), integers(prefix)));
  });
  m.def("segmented_topk", [](Address rows, Address scores, Address tables, Address keep) {
    finish(segmented_topk(device, at<Rows>(rows), at<Scores>(scores), at<Tables>(tables), integers(keep)));
  });
  m.def("bucket_argmax", [](Address rows, Address scores, Address tables, Address decision) {
    finish(bucket_argmax(device, at<Rows>(rows), at<Scores>(scores), at<Tables>(tables), at<Decision>(decision)));
  });
  m.def("pack_prefixes", [](Address rows, Address keep_lens, Address tokens, Address packed, Address decision) {
    finish(pack_prefixes(device, at<Rows>(rows), integers(keep_lens), at<Tokens>(tokens), at<Packed>(packed),
                         at<Decision>(decision)));
  });
}

}  // namespace dcut::simt
