// SPDX-License-Identifier: Apache-2.0
#include "collectives/control.h"

#include <unistd.h>

#include <fstream>
#include <sstream>

namespace vllm_arm {
namespace {

// State and start time from /proc/PID/stat, in which the name before them may hold blanks and brackets.
bool read_stat(std::int64_t pid, char& state, std::uint64_t& start_time) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const std::size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) return false;
  std::istringstream fields(text.substr(end_of_name + 1));
  fields >> state;
  std::string skipped;
  constexpr int kFieldsBetween = 18;  // from the fourth to the 21st; the start time is the 22nd
  for (int i = 0; i < kFieldsBetween; ++i) fields >> skipped;
  return static_cast<bool>(fields >> start_time);
}

std::string describe(const Group& group, const char* operation, const Failure& failure) {
  const std::int64_t pid = group.processes[failure.rank].pid;
  std::ostringstream text;
  text << operation << ": rank " << failure.rank << " (process " << pid << ") ";
  switch (failure.reason) {
    case Failure::Reason::died: text << "has died"; break;
    case Failure::Reason::silent:
      text << "has been silent for " << group.timeout.count() << " s (VLLM_ARM_COLLECTIVE_TIMEOUT)";
      break;
    case Failure::Reason::closed: text << "has closed the communicator"; break;
    case Failure::Reason::mismatch:
      text << "runs another operation, size or dtype than rank " << failure.found_by;
      break;
    case Failure::Reason::none: text << "has failed"; break;
  }
  if (failure.found_by != group.rank) text << ", as rank " << failure.found_by << " found";
  return text.str();
}

}  // namespace

Process Process::self() {
  Process process{getpid(), 0};
  char state;
  if (!read_stat(process.pid, state, process.start_time)) process.start_time = 0;
  return process;
}

Process Process::as_others_see_it() const {
  Process process = *this;
  char state;
  if (start_time != 0 && !read_stat(pid, state, process.start_time)) process.start_time = start_time;
  return process;
}

bool Process::is_alive() const {
  if (start_time == 0 || pid == getpid()) return true;
  char state;
  std::uint64_t start;
  if (!read_stat(pid, state, start)) return false;
  return start == start_time && state != 'Z' && state != 'X';
}

void Group::check(const char* operation) const {
  const std::uint64_t word = controls[rank]->failure.word.load(std::memory_order_relaxed);
  if (word != 0) throw CollectiveError(describe(*this, operation, Failure::unpack(word)));
}

void Group::fail(const char* operation, Failure failure) const {
  for (Control* control : controls) {
    std::uint64_t none = 0;
    control->failure.word.compare_exchange_strong(none, failure.pack());
  }
  check(operation);
  throw CollectiveError(describe(*this, operation, failure));
}

}  // namespace vllm_arm
