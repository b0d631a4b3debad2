// SPDX-License-Identifier: Apache-2.0
#include "host/allocator.h"

#include <dlfcn.h>
#include <link.h>

#include <cstddef>

namespace vllm_arm {
namespace {

// dl_iterate_phdr's callback: stores in `result` the name of the library if it defines malloc itself, and then stops.
int take_if_it_defines_malloc(dl_phdr_info* library, std::size_t, void* result) {
  if (library->dlpi_name == nullptr || *library->dlpi_name == '\0') return 0;
  void* handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return 0;
  void* symbol = dlsym(handle, "malloc");
  dlclose(handle);
  Dl_info info;
  if (symbol == nullptr || dladdr(symbol, &info) == 0 || std::string(library->dlpi_name) != info.dli_fname) return 0;
  *static_cast<std::string*>(result) = library->dlpi_name;
  return 1;
}

}  // namespace

// The first in the loader's order that defines it: the address of malloc alone can be the executable's own stub.
std::string malloc_library() {
  std::string name;
  dl_iterate_phdr(take_if_it_defines_malloc, &name);
  return name;
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
