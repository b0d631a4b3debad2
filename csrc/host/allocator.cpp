// SPDX-License-Identifier: Apache-2.0
#include "host/allocator.h"

#include <dlfcn.h>

#include <cstddef>

namespace vllm_arm {

std::string malloc_library() {
  void* symbol = dlsym(RTLD_DEFAULT, "malloc");
  Dl_info info;
  if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  return info.dli_fname;
}

std::optional<MimallocStatistics> mimalloc_statistics() {
  using Version = int();
  using ProcessInfo = void(std::size_t*, std::size_t*, std::size_t*, std::size_t*, std::size_t*, std::size_t*,
                           std::size_t*, std::size_t*);
  const auto version = reinterpret_cast<Version*>(dlsym(RTLD_DEFAULT, "mi_version"));
  const auto process_info = reinterpret_cast<ProcessInfo*>(dlsym(RTLD_DEFAULT, "mi_process_info"));
  if (version == nullptr || process_info == nullptr) return std::nullopt;
  std::size_t elapsed, user, system, resident, peak_resident, committed, peak_committed, faults;
  process_info(&elapsed, &user, &system, &resident, &peak_resident, &committed, &peak_committed, &faults);
  return MimallocStatistics{version(),
                            static_cast<std::int64_t>(resident),
                            static_cast<std::int64_t>(peak_resident),
                            static_cast<std::int64_t>(committed),
                            static_cast<std::int64_t>(peak_committed),
                            static_cast<std::int64_t>(faults)};
}

}  // namespace vllm_arm
