// Random steps through the torch-free kernel in exactly sized heap buffers, for sanitizer builds and other
// architectures. Prints one hash of all results; every instruction set and every architecture must print the same.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "dcut/launch.h"

extern "C" int dcut_cpu_set_isa(int);

namespace {

std::mt19937 engine(7);
uint64_t hash = 14695981039346656037u;

uint32_t draw(uint32_t n) { return engine() % n; }

template <class T, class F>
std::vector<T> fill(size_t n, F value) {
  std::vector<T> v(n);
  for (T& x : v) x = static_cast<T>(value());
  v.shrink_to_fit();
  return v;
}

template <class T>
const T* maybe(const std::vector<T>& v) {
  return draw(2) ? v.data() : nullptr;
}

template <class T>
void mix(const std::vector<T>& v) {
  const unsigned char* p = reinterpret_cast<const unsigned char*>(v.data());
  for (size_t j = 0; j < v.size() * sizeof(T); ++j) hash = (hash ^ p[j]) * 1099511628211u;
}

void step() {
  const uint32_t batch = draw(70), width = draw(64), slots = batch + draw(3), buckets = draw(12), blocks = draw(8);
  const bool half = draw(4) == 0, ids_64 = draw(2), seq_64 = draw(2);
  const uint32_t capacity = draw(3) ? batch * (width + 1) : batch + draw(batch * (width + 1) + 1);
  const auto bits = [] { return draw(8) ? 0x3c000000u + draw(0x03800000u) : engine(); };  // mostly in (0.007, 1]
  const auto confidence = fill<uint32_t>(half ? (slots * width + 1) / 2 : slots * width, bits);
  const auto draft_ids = fill<int32_t>(slots * width * (ids_64 ? 2 : 1), [] { return draw(1000); });
  const auto bonus_ids = fill<int32_t>(batch * (ids_64 ? 2 : 1), [] { return draw(1000); });
  const auto seq_lens = fill<int32_t>(batch * (seq_64 ? 2 : 1), engine);
  const auto budgets = fill<int32_t>(buckets, [&] { return draw(batch * (width + 1) + 9) - 3u; });
  const auto costs = fill<float>(buckets, [] { return 0.002f * static_cast<float>(draw(1000)); });
  const auto lengths = [&] { return static_cast<int32_t>(draw(width + 4)) - 2; };
  const auto draft_lens = fill<int32_t>(batch, lengths), min_keep = fill<int32_t>(batch, lengths);
  const auto max_keep = fill<int32_t>(batch, lengths);
  const auto weight = fill<float>(batch, [] { return 0.01f * static_cast<float>(draw(1000)); });
  const auto row_index = fill<int32_t>(batch, [&] { return static_cast<int32_t>(draw(slots + 3)) - 1; });
  const auto base_lens = fill<int32_t>(batch, [] { return draw(50) ? draw(6) : 0x7ffffff0u; });
  const auto num_reqs = fill<int32_t>(1, [&] { return draw(batch + 3) - 1u; });
  const auto budget = fill<int32_t>(1, [&] { return draw(batch * (width + 1) + 2); });
  const auto calibration = fill<int32_t>(width * 65, [] { return draw(9) ? draw(60u << 20) : engine(); });
  const auto envelope = fill<int32_t>(buckets * 2, [] { return draw(9) ? draw(1u << 30) : engine(); });
  const auto block_table = fill<int32_t>(batch * blocks, [] { return static_cast<int32_t>(draw(50)) - 2; });

  const auto sized = [](size_t n) { return std::vector<int32_t>(n, -77); };
  auto keep = sized(batch), cu = sized(batch + 1), kv = sized(batch), tokens = sized(capacity * (ids_64 ? 2 : 1));
  auto requests = sized(capacity), index = sized(capacity), logits = sized(capacity), decision = sized(4);
  auto next = sized(2);
  std::vector<int64_t> positions(capacity, -77), mapping(capacity, -77), gains(buckets, -77), host(1, -77);

  const dcut::Rows rows{maybe(draft_lens),
                        maybe(min_keep),
                        maybe(max_keep),
                        maybe(weight),
                        row_index.data(),
                        maybe(base_lens),
                        maybe(num_reqs),
                        static_cast<int32_t>(batch),
                        static_cast<int32_t>(slots),
                        static_cast<int32_t>(width),
                        static_cast<int32_t>(capacity)};
  const dcut::FloatType type =
      half ? (draw(2) ? dcut::FloatType::kFloat16 : dcut::FloatType::kBFloat16) : dcut::FloatType::kFloat32;
  const dcut::Scores scores{confidence.data(), nullptr, maybe(calibration), type, draw(3) == 0, draw(2) == 0};
  const dcut::Tables tables{
      budgets.data(), costs.data(), maybe(budget), maybe(envelope), 1, 1, 1, static_cast<int32_t>(buckets),
      draw(2) == 0};
  const dcut::Tokens input{draft_ids.data(),
                           bonus_ids.data(),
                           seq_lens.data(),
                           maybe(block_table),
                           3,
                           static_cast<int32_t>(blocks),
                           16,
                           ids_64,
                           seq_64};
  const dcut::Packed packed{keep.data(),     cu.data(),      kv.data(),    tokens.data(), positions.data(),
                            requests.data(), mapping.data(), index.data(), logits.data(), draw(2) == 0};
  const bool carries = draw(2), shows = draw(2);
  const dcut::Decision decided{decision.data(), gains.data(), carries ? next.data() : nullptr,
                               carries && shows ? host.data() : nullptr};
  dcut::cpu::select_and_pack(rows, scores, tables, input, packed, decided);
  for (const auto& v : {keep, cu, kv, tokens, requests, index, logits, decision, next}) mix(v);
  for (const auto& v : {positions, mapping, gains, host}) mix(v);

  // The parts, on arbitrary prefix sums.
  auto prefix = sized(batch * width), depths = sized(buckets * batch);
  dcut::cpu::log_prefix_sum(rows, scores, prefix.data());
  mix(prefix);
  for (int32_t& p : prefix) p = draw(9) ? p : static_cast<int32_t>(engine());
  dcut::Rows own = rows;
  own.row_index = nullptr, own.slots = own.batch;
  const dcut::Scores given{nullptr, prefix.data(), nullptr, dcut::FloatType::kFloat32, false, false};
  dcut::cpu::segmented_topk(own, given, tables, depths.data());
  dcut::cpu::bucket_argmax(own, given, tables, decided);
  mix(depths), mix(decision), mix(gains), mix(next), mix(host);
}

}  // namespace

int main(int argc, char** argv) {
  const int isa = argc > 1 ? atoi(argv[1]) : 0, steps = argc > 2 ? atoi(argv[2]) : 500;
  if (!dcut_cpu_set_isa(isa)) {
    puts("absent");
    return 0;
  }
  for (int j = 0; j < steps; ++j) step();
  printf("%016llx\n", static_cast<unsigned long long>(hash));
}
