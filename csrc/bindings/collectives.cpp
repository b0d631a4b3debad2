// SPDX-License-Identifier: Apache-2.0
// The collective operations. A communicator is a handle here: a small integer, the same on every rank of a group whose
// ranks open their communicators in the same order.
#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "collectives/communicator.h"
#include "collectives/reduce_sum_table.h"
#include "collectives/segment.h"

namespace {

using vllm_arm::Address;
using vllm_arm::Communicator;
using vllm_arm::Segment;
using vllm_arm::SumType;
using vllm_arm::bindings::check_cpu;
using vllm_arm::bindings::Tensor;

// Not STD_TORCH_CHECK, whose message begins with a file's name: these are passed on to other ranks and to users.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw vllm_arm::CollectiveError(text.str());
}

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// A communicator, before and after it is connected.
struct Entry {
  int rank, world_size, threads;
  double timeout_seconds;
  std::vector<Segment> segments;  // this rank's own; all of them, in the order of ranks, once it is connected
  std::unique_ptr<Communicator> communicator;
};

std::mutex entries_mutex;
std::vector<std::shared_ptr<Entry>> entries;

std::shared_ptr<Entry> find_entry(std::int64_t handle) {
  const std::lock_guard lock(entries_mutex);
  if (handle < 0 || handle >= static_cast<std::int64_t>(entries.size())) return nullptr;
  return entries[static_cast<std::size_t>(handle)];
}

std::shared_ptr<Entry> entry_of(const char* op, std::int64_t handle) {
  std::shared_ptr<Entry> entry = find_entry(handle);
  require(entry != nullptr, op, ": no communicator has the handle ", handle);
  return entry;
}

// Keeps the entry, and so the memory, for as long as an operation lasts.
struct Use {
  std::shared_ptr<Entry> entry;

  Use(const char* op, std::int64_t handle) : entry(entry_of(op, handle)) {
    require(entry->communicator != nullptr, op, ": communicator ", handle, " is not connected");
  }
  Communicator* operator->() const { return entry->communicator.get(); }
};

std::int64_t collective_create(std::int64_t rank, std::int64_t world_size, std::int64_t bytes, double timeout_seconds) {
  require(world_size >= 1 && world_size <= vllm_arm::kMaximumWorldSize, "open_communicator: world_size is ", world_size,
          ", expected 1 to ", vllm_arm::kMaximumWorldSize);
  require(rank >= 0 && rank < world_size, "open_communicator: rank is ", rank, ", expected 0 to ", world_size - 1);
  require(timeout_seconds > 0, "open_communicator: timeout_seconds is ", timeout_seconds, ", expected more than 0");
  const int threads =
      std::min(static_cast<int>(torch::stable::get_num_threads()), static_cast<int>(vllm_arm::kMaximumLanes));
  // Refuses a size that is too small before the memory is taken.
  vllm_arm::Layout(bytes, static_cast<int>(world_size), threads);
  auto entry = std::make_shared<Entry>(
      Entry{static_cast<int>(rank), static_cast<int>(world_size), threads, timeout_seconds, {}, nullptr});
  entry->segments.emplace_back(bytes);
  const std::lock_guard lock(entries_mutex);
  auto free = std::find(entries.begin(), entries.end(), nullptr);
  if (free == entries.end()) free = entries.insert(free, nullptr);
  *free = std::move(entry);
  return free - entries.begin();
}

std::string collective_address(std::int64_t handle) {
  const std::shared_ptr<Entry> entry = entry_of("open_communicator", handle);
  return entry->segments.front().address(entry->threads).text();
}

void run_lanes(int count, const std::function<void(int)>& lane) {
  torch::stable::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) lane(static_cast<int>(i));
  });
}

void collective_connect(std::int64_t handle, std::vector<std::string> addresses) {
  const std::shared_ptr<Entry> entry = entry_of("open_communicator", handle);
  require(static_cast<int>(addresses.size()) == entry->world_size, "open_communicator: ", addresses.size(),
          " addresses, expected ", entry->world_size);
  std::vector<Segment> segments;
  std::vector<std::byte*> data;
  std::vector<vllm_arm::Process> processes;
  const std::int64_t bytes = entry->segments.front().address(0).bytes;
  int lanes = vllm_arm::kMaximumLanes;
  for (int rank = 0; rank < entry->world_size; ++rank) {
    const Address address = Address::parse(addresses[rank]);
    require(address.bytes == bytes, "rank ", rank, " has ", address.bytes, " bytes of shared memory, this rank ",
            bytes);
    lanes = std::min(lanes, std::max(1, address.threads));
    processes.push_back(rank == entry->rank ? address.process : address.process.as_others_see_it());
    if (rank == entry->rank) {
      data.push_back(entry->segments.front().data());
      continue;
    }
    try {
      segments.emplace_back(address);
    } catch (const std::exception& error) {
      fail("the shared memory of rank ", rank, " cannot be reached: ", error.what());
    }
    data.push_back(segments.back().data());
  }
  const auto timeout = std::chrono::duration<double>(entry->timeout_seconds);
  entry->communicator = std::make_unique<Communicator>(
      entry->rank, data, std::move(processes), vllm_arm::Layout(bytes, entry->world_size, lanes), timeout,
      vllm_arm::select_kernel(vllm_arm::kReduceSumTable).kernel, run_lanes);
  for (Segment& segment : segments) entry->segments.push_back(std::move(segment));
}

// Every rank has connected, or has given up.
void collective_seal(std::int64_t handle) {
  const std::shared_ptr<Entry> entry = entry_of("open_communicator", handle);
  entry->segments.front().close_descriptor();
  entry->communicator->tune(30);
}

void collective_close(std::int64_t handle) {
  const std::shared_ptr<Entry> entry = find_entry(handle);
  if (entry == nullptr) return;
  if (entry->communicator != nullptr) entry->communicator->close();
  const std::lock_guard lock(entries_mutex);
  entries[static_cast<std::size_t>(handle)] = nullptr;
}

bool collective_is_open(std::int64_t handle) {
  const std::shared_ptr<Entry> entry = find_entry(handle);
  return entry != nullptr && entry->communicator != nullptr;
}

std::int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

void check_dense(const char* op, const char* name, const Tensor& tensor) {
  check_cpu(op, name, tensor);
  require(tensor.is_contiguous(), op, ": ", name, " is not contiguous");
}

SumType sum_type(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::BFloat16: return SumType::bfloat16;
    case torch::headeronly::ScalarType::Half: return SumType::float16;
    case torch::headeronly::ScalarType::Float: return SumType::float32;
    case torch::headeronly::ScalarType::Int: return SumType::int32;
    case torch::headeronly::ScalarType::Long: return SumType::int64;
    default:
      fail(op, ": ", name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
           ", expected bfloat16, float16, float32, int32 or int64");
  }
}

// Units that each rank gives or gets: `sizes` rows, or where that is empty the same for every rank. `shared` is the
// tensor of all ranks, `own` that of this rank.
std::vector<std::int64_t> parts_of(const char* op, const Communicator& communicator, const char* own_name,
                                   const Tensor& own, const char* shared_name, const Tensor* shared,
                                   const std::optional<std::vector<std::int64_t>>& sizes,
                                   std::int64_t unit_of_element) {
  const int world_size = communicator.world_size();
  std::vector<std::int64_t> parts(world_size, own.numel() * unit_of_element);
  if (sizes) {
    require(static_cast<int>(sizes->size()) == world_size, op, ": sizes has ", sizes->size(),
            " entries, expected one for each of ", world_size, " ranks");
    require(own.dim() >= 1 && own.size(0) == (*sizes)[communicator.rank()], op, ": ", own_name, " has ",
            own.dim() >= 1 ? own.size(0) : 0, " rows, expected sizes[rank], ", (*sizes)[communicator.rank()]);
    std::int64_t row = unit_of_element;
    for (std::int64_t i = 1; i < own.dim(); ++i) row *= own.size(i);
    for (int rank = 0; rank < world_size; ++rank) {
      require((*sizes)[rank] >= 0, op, ": sizes[", rank, "] is ", (*sizes)[rank], ", expected 0 or more");
      parts[rank] = (*sizes)[rank] * row;
    }
  }
  if (shared != nullptr) {
    const std::int64_t total = std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
    require(shared->numel() * unit_of_element == total, op, ": ", shared_name, " has ", shared->numel(),
            " elements, expected ", total / unit_of_element);
    require(shared->scalar_type() == own.scalar_type(), op, ": ", shared_name, " has another dtype than ", own_name);
    check_dense(op, shared_name, *shared);
  }
  check_dense(op, own_name, own);
  return parts;
}

void collective_all_reduce(Tensor tensor, std::int64_t handle) {
  const Use use("all_reduce", handle);
  check_dense("all_reduce", "tensor", tensor);
  use->all_reduce(tensor.mutable_data_ptr(), tensor.numel(), sum_type("all_reduce", "tensor", tensor));
}

void collective_all_gather(Tensor output, Tensor input, std::int64_t handle,
                           std::optional<std::vector<std::int64_t>> sizes) {
  const Use use("all_gather", handle);
  const auto element = static_cast<std::int64_t>(input.element_size());
  const auto parts =
      parts_of("all_gather", *use.entry->communicator, "input", input, "output", &output, sizes, element);
  use->all_gather(output.mutable_data_ptr(), input.const_data_ptr(), parts);
}

void collective_gather(std::optional<Tensor> output, Tensor input, std::int64_t handle, std::int64_t destination) {
  const Use use("gather", handle);
  const bool is_destination = use->rank() == destination;
  require(!is_destination || output, "gather: output is missing on the destination");
  const auto element = static_cast<std::int64_t>(input.element_size());
  const auto parts = parts_of("gather", *use.entry->communicator, "input", input, "output",
                              is_destination ? &*output : nullptr, std::nullopt, element);
  use->gather(is_destination ? output->mutable_data_ptr() : nullptr, input.const_data_ptr(), parts,
              static_cast<int>(destination));
}

void collective_reduce_scatter(Tensor output, Tensor input, std::int64_t handle,
                               std::optional<std::vector<std::int64_t>> sizes) {
  const Use use("reduce_scatter", handle);
  const auto parts = parts_of("reduce_scatter", *use.entry->communicator, "output", output, "input", &input, sizes, 1);
  use->reduce_scatter(output.mutable_data_ptr(), input.const_data_ptr(), parts,
                      sum_type("reduce_scatter", "input", input));
}

void collective_broadcast(Tensor tensor, std::int64_t handle, std::int64_t source) {
  const Use use("broadcast", handle);
  check_dense("broadcast", "tensor", tensor);
  use->broadcast(tensor.mutable_data_ptr(), bytes_of(tensor), static_cast<int>(source));
}

void collective_send(Tensor tensor, std::int64_t handle, std::int64_t destination) {
  const Use use("send", handle);
  check_dense("send", "tensor", tensor);
  use->send(tensor.const_data_ptr(), bytes_of(tensor), static_cast<int>(destination));
}

void collective_recv(Tensor tensor, std::int64_t handle, std::int64_t source) {
  const Use use("recv", handle);
  check_dense("recv", "tensor", tensor);
  use->receive(tensor.mutable_data_ptr(), bytes_of(tensor), static_cast<int>(source));
}

void collective_barrier(std::int64_t handle) { Use("barrier", handle)->barrier(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def("collective_create(int rank, int world_size, int bytes, float timeout_seconds) -> int");
  library.def("collective_address(int handle) -> str");
  library.def("collective_connect(int handle, str[] addresses) -> ()");
  library.def("collective_seal(int handle) -> ()");
  library.def("collective_close(int handle) -> ()");
  library.def("collective_is_open(int handle) -> bool");
  library.def("collective_barrier(int handle) -> ()");
  library.def("collective_all_reduce(Tensor(a!) tensor, int handle) -> ()");
  library.def("collective_all_gather(Tensor(a!) output, Tensor input, int handle, int[]? sizes) -> ()");
  library.def("collective_gather(Tensor(a!)? output, Tensor input, int handle, int destination) -> ()");
  library.def("collective_reduce_scatter(Tensor(a!) output, Tensor input, int handle, int[]? sizes) -> ()");
  library.def("collective_broadcast(Tensor(a!) tensor, int handle, int source) -> ()");
  library.def("collective_send(Tensor tensor, int handle, int destination) -> ()");
  library.def("collective_recv(Tensor(a!) tensor, int handle, int source) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CompositeExplicitAutograd, library) {
  library.impl("collective_create", TORCH_BOX(&collective_create));
  library.impl("collective_address", TORCH_BOX(&collective_address));
  library.impl("collective_connect", TORCH_BOX(&collective_connect));
  library.impl("collective_seal", TORCH_BOX(&collective_seal));
  library.impl("collective_close", TORCH_BOX(&collective_close));
  library.impl("collective_is_open", TORCH_BOX(&collective_is_open));
  library.impl("collective_barrier", TORCH_BOX(&collective_barrier));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("collective_all_reduce", TORCH_BOX(&collective_all_reduce));
  library.impl("collective_all_gather", TORCH_BOX(&collective_all_gather));
  library.impl("collective_gather", TORCH_BOX(&collective_gather));
  library.impl("collective_reduce_scatter", TORCH_BOX(&collective_reduce_scatter));
  library.impl("collective_broadcast", TORCH_BOX(&collective_broadcast));
  library.impl("collective_send", TORCH_BOX(&collective_send));
  library.impl("collective_recv", TORCH_BOX(&collective_recv));
}
