// The operators on CPU tensors.
#include <torch/csrc/stable/ops.h>

#include "dcut/launch.h"
#include "ops.h"
#include "register.h"

namespace dcut::binding {
namespace {

struct CpuKernels {
  static constexpr Limits kLimits = Limits::kCpu;
  static void check_pinned(const Tensor&) {}

  template <class... Args>
  static void select_and_pack(Device, const Args&... args) {
    cpu::select_and_pack(args...);
  }
  template <class... Args>
  static void log_prefix_sum(Device, const Args&... args) {
    cpu::log_prefix_sum(args...);
  }
  template <class... Args>
  static void segmented_topk(Device, const Args&... args) {
    cpu::segmented_topk(args...);
  }
  template <class... Args>
  static void bucket_argmax(Device, const Args&... args) {
    cpu::bucket_argmax(args...);
  }
  template <class... Args>
  static void pack_prefixes(Device, const Args&... args) {
    cpu::pack_prefixes(args...);
  }
};

cpu::Statistic statistic(const std::string& name) {
  if (name == "log_prob") return cpu::Statistic::kLogProb;
  if (name == "max_prob") return cpu::Statistic::kMaxProb;
  if (name == "collision") return cpu::Statistic::kCollision;
  if (name != "margin") fail("statistics", "'log_prob', 'max_prob', 'collision' or 'margin'", "'" + name + "'");
  return cpu::Statistic::kMargin;
}

constexpr int64_t kGrain = 1 << 15;  // logits that are worth a thread

// Of the CPU only: Triton's kernel serves GPUs.
void draft_confidence(StableIValue* stack, uint64_t, uint64_t) {
  Reader in(stack);
  const Tensor logits = in.tensor(), temperature = in.optional_tensor(), given = in.optional_tensor();
  std::vector<cpu::Statistic> statistics;
  const std::vector<std::string> names = in.words();

  check_defined(logits, "logits");
  const Device device = device_of(logits);
  check(logits, "logits", Types::kFloats, {kAny, kAny, kAny}, device);
  const int64_t batch = logits.sizes[0], width = logits.sizes[1];
  check_draft_len("logits", width);
  check_size_limits("logits", batch, batch, width, CpuKernels::kLimits);
  const int64_t vocab = check_vocab("logits", logits);
  check_optional(temperature, "temperature", Types::kFloat32, {width}, device);
  check_optional(given, "draft_ids", Types::kInt64, {batch, width}, device);
  for (const std::string& name : names) statistics.push_back(statistic(name));

  const int64_t count = static_cast<int64_t>(statistics.size());
  Tensor draft_ids = allocate({batch, width}, int64_dtype(), device);
  Tensor values = allocate({count, batch, width}, float32_dtype(), device);
  const cpu::Logits rows = {logits.data,
                            temperature.as<float>(),
                            given.as<int64_t>(),
                            statistics.data(),
                            draft_ids.as<int64_t>(),
                            values.as<float>(),
                            batch * width,
                            width,
                            vocab,
                            count,
                            float_type(logits)};
  torch::stable::parallel_for(0, rows.rows, std::max<int64_t>(kGrain / vocab, 1),
                              [&](int64_t first, int64_t end) { cpu::draft_confidence(rows, first, end); });
  stack[0] = torch::stable::detail::from(draft_ids.release());
  stack[1] = torch::stable::detail::from(values.release());
}

}  // namespace

void bind_cpu(torch::stable::detail::StableLibrary& m) {
  bind<CpuKernels>(m);
  m.impl("draft_confidence", &draft_confidence);
}

}  // namespace dcut::binding
