// SPDX-License-Identifier: Apache-2.0
// vllm_arm._host: what this machine and process are. Needs no torch, so that it answers before torch is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "host/allocator.h"
#include "host/core_latency.h"
#include "host/elf_atomics.h"
#include "isa/isa.h"
#include "operations.h"

namespace py = pybind11;
using vllm_arm::Features;
using vllm_arm::Isa;

namespace {

std::map<std::string, std::vector<std::string>> operations() {
  std::map<std::string, std::vector<std::string>> table;
#define VLLM_ARM_NAME(isa) #isa,
#define VLLM_ARM_OPERATION(name, VARIANTS) table[#name] = {VARIANTS(VLLM_ARM_NAME)};
  VLLM_ARM_OPERATIONS(VLLM_ARM_OPERATION)
#undef VLLM_ARM_OPERATION
#undef VLLM_ARM_NAME
  return table;
}

std::string select_isa(const std::vector<std::string>& variants, const Features& features,
                       const std::optional<std::string>& forced) {
  std::vector<Isa> isas;
  for (const std::string& variant : variants) isas.push_back(vllm_arm::parse_isa(variant));
  std::optional<Isa> forced_isa;
  if (forced) forced_isa = vllm_arm::parse_isa(*forced);
  return std::string(vllm_arm::isa_name(vllm_arm::select_isa(isas, features, forced_isa)));
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "What this machine and this process are: CPU features, kernel variants, allocator, atomics.";

  py::class_<Features>(module, "Features", "What a CPU offers; a plain value.")
      .def(py::init<>())
      .def_readwrite("asimd_half", &Features::asimd_half)
      .def_readwrite("dot_product", &Features::dot_product)
      .def_readwrite("lse_atomics", &Features::lse_atomics)
      .def_readwrite("bfloat16", &Features::bfloat16)
      .def_readwrite("int8_matmul", &Features::int8_matmul)
      .def_readwrite("sve", &Features::sve)
      .def_readwrite("sve_bfloat16", &Features::sve_bfloat16)
      .def_readwrite("sve2", &Features::sve2)
      .def_readwrite("sve_bytes", &Features::sve_bytes)
      .def_readwrite("midr", &Features::midr);
  module.def("host_features", &vllm_arm::host_features, "The features of this CPU.");
  module.def("core_name", &vllm_arm::core_name, py::arg("midr"),
             "N1, N2, V1, V2, N3 or V3 for a Neoverse core's MIDR_EL1, 'other' or 'unknown' (0).");
  module.def("operations", &operations, "Every op of the library, with the kernel variants that this build holds.");
  module.def(
      "missing_features",
      [](const std::string& isa, const Features& features) {
        return vllm_arm::missing_features(vllm_arm::parse_isa(isa), features);
      },
      py::arg("isa"), py::arg("features"), "What `features` lacks for `isa`; empty where nothing.");
  module.def("select_isa", &select_isa, py::arg("variants"), py::arg("features"), py::arg("forced") = py::none(),
             "The variant that runs on `features`. Raises ValueError where `forced` cannot run there.");

  py::class_<vllm_arm::AtomicCounts>(module, "AtomicCounts", "Atomic instructions in an aarch64 library.")
      .def_readonly("lse", &vllm_arm::AtomicCounts::lse)
      .def_readonly("exclusive", &vllm_arm::AtomicCounts::exclusive)
      .def_readonly("is_aarch64", &vllm_arm::AtomicCounts::is_aarch64);
  module.def("count_atomics", &vllm_arm::count_atomics, py::arg("path"),
             "Count the atomic instructions of the ELF file at `path`. Raises RuntimeError naming the path.");

  module.def(
      "core_latency_ns", &vllm_arm::core_latency_ns, py::arg("first"), py::arg("second"), py::arg("round_trips"),
      py::arg("repeats"), py::call_guard<py::gil_scoped_release>(),
      "Nanoseconds that a store on CPU `first` takes to be seen on CPU `second`: half a round trip of a cache "
      "line, the least of `repeats` means over `round_trips`. Raises ValueError or RuntimeError naming the CPU.");

  module.def("malloc_library", &vllm_arm::malloc_library, "Path of the library whose malloc this process calls.");
  py::class_<vllm_arm::MimallocStatistics>(module, "MimallocStatistics", "mimalloc's figures, in bytes.")
      .def_readonly("version", &vllm_arm::MimallocStatistics::version)
      .def_readonly("resident_bytes", &vllm_arm::MimallocStatistics::resident_bytes)
      .def_readonly("peak_resident_bytes", &vllm_arm::MimallocStatistics::peak_resident_bytes)
      .def_readonly("committed_bytes", &vllm_arm::MimallocStatistics::committed_bytes)
      .def_readonly("peak_committed_bytes", &vllm_arm::MimallocStatistics::peak_committed_bytes)
      .def_readonly("page_faults", &vllm_arm::MimallocStatistics::page_faults);
  module.def("mimalloc_statistics", &vllm_arm::mimalloc_statistics, "mimalloc's figures, or None without mimalloc.");
}
