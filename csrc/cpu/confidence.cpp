#include "confidence.h"

#include "isa.h"

namespace dcut::cpu {

void draft_confidence(const Logits& logits, int64_t first, int64_t end) {
#if defined(__x86_64__)
  if (&isa() == &kAvx512) return kConfidenceAvx512(logits, first, end);
  if (&isa() == &kAvx2) return kConfidenceAvx2(logits, first, end);
#endif
  kConfidencePortable(logits, first, end);
}

}  // namespace dcut::cpu
