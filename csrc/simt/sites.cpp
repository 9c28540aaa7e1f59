#include "sites.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>

namespace dcut::simt {
namespace {

// Asks addr2line, which comes with the compiler; without it, the offset in the binary has to do.
std::string look_up(const void* code) {
  Dl_info module;
  if (dladdr(code, &module) == 0) return "?";
  const long offset = static_cast<const char*>(code) - static_cast<const char*>(module.dli_fbase) - 1;
  char where[32];
  std::snprintf(where, sizeof where, "0x%lx", offset);
  const std::string command = std::string("addr2line -s -e '") + module.dli_fname + "' " + where + " 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  char line[512];
  if (!pipe || !std::fgets(line, sizeof line, pipe.get()) || line[0] == '?') return where;
  const std::string text = line;
  return text.substr(0, text.find_first_of(" \n"));  // a discriminator may follow
}

}  // namespace

bool Place::operator==(const Place& other) const {
  return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
}

std::string Place::text() const {
  const char* slash = std::strrchr(file, '/');
  return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

uint32_t Sites::of(const void* code) {
  const auto [found, added] = by_code_.try_emplace(code, static_cast<uint32_t>(sites_.size()));
  if (added) sites_.push_back({code, {}});
  return found->second;
}

uint32_t Sites::of(const Place& place) {
  const auto [found, added] = by_place_.try_emplace({place.file, place.line}, static_cast<uint32_t>(sites_.size()));
  if (added) sites_.push_back({nullptr, place});
  return found->second;
}

std::string Sites::text(uint32_t site) const {
  return sites_[site].code ? look_up(sites_[site].code) : sites_[site].place.text();
}

}  // namespace dcut::simt
