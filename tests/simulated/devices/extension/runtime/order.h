// The order of work on several streams. Work on one stream has an order; work on two has none until one waits.
//
// Each stream has a clock: for every stream, how much of its work is done before whatever this stream does next. A wait
// joins two clocks. Memory notes who has used it, so that a use without an order between is found.
#pragma once

#include "devices.h"

#include <c10/core/Stream.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace simulated {

constexpr int64_t kEveryStream = -1;

inline thread_local int64_t current_stream[kMostDevices] = {0};

struct StreamName {
  DeviceIndex device;
  int64_t number;

  bool operator<(const StreamName& other) const {
    return std::tie(device, number) < std::tie(other.device, other.number);
  }

  bool operator==(const StreamName& other) const {
    return device == other.device && number == other.number;
  }

  std::string text() const {
    return "stream " + std::to_string(number) + " of cuda:" + std::to_string(device);
  }
};

// For each stream, the number of its last operation that is done before.
using Clock = std::map<StreamName, int64_t>;

// These are never destroyed: tensors are freed until the very end of the process.
inline std::mutex& order_mutex = *new std::mutex;
inline std::map<StreamName, Clock>& clocks = *new std::map<StreamName, Clock>;
// What the host has waited for is done before whatever it starts next.
inline Clock& clock_of_host = *new Clock;
// Memory that was freed too early. A destructor cannot raise, so the next operation does.
inline std::string& freed_too_early = *new std::string;

inline StreamName stream_in_use(DeviceIndex device) {
  return {device, current_stream[device]};
}

inline void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, operation] : other) {
    auto& known = clock[stream];
    known = std::max(known, operation);
  }
}

inline bool has_seen(const Clock& clock, const StreamName& stream, int64_t operation) {
  const auto known = clock.find(stream);
  return known != clock.end() && known->second >= operation;
}

// Waits.

inline Clock clock_of(const StreamName& stream) {
  std::lock_guard<std::mutex> lock(order_mutex);
  Clock clock = clocks[stream];
  join(clock, clock_of_host);
  return clock;
}

inline void let_stream_wait(const StreamName& stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(order_mutex);
  join(clocks[stream], clock);
}

inline void let_host_wait(const Clock& clock) {
  std::lock_guard<std::mutex> lock(order_mutex);
  join(clock_of_host, clock);
}

// The host waits for a stream of a device, or for all of them.
inline void let_host_wait(DeviceIndex device, int64_t stream) {
  std::lock_guard<std::mutex> lock(order_mutex);
  for (const auto& [name, clock] : clocks) {
    if (name.device == device && (stream == kEveryStream || name.number == stream)) {
      join(clock_of_host, clock);
    }
  }
}

// Whether all work of one stream, so far, is done before whatever another does next.
inline bool is_behind(const StreamName& stream, const StreamName& other) {
  const Clock clock = clock_of(stream);
  std::lock_guard<std::mutex> lock(order_mutex);
  const auto own = clocks[other].find(other);
  return own == clocks[other].end() || has_seen(clock, other, own->second);
}

// Memory.

struct Use {
  StreamName stream;
  int64_t operation;
};

// Who has used an allocation.
struct Uses {
  // The stream to whose memory it returns when it is freed.
  StreamName owner;
  std::optional<Use> last_write;
  // The last read of each stream since then.
  Clock reads;
  // Streams that `record_stream` names: the allocator waits for them.
  std::set<StreamName> recorded;
};

// One operation on a stream.
class Work {
 public:
  Work(StreamName stream, std::string name) : stream_(stream), name_(std::move(name)) {
    std::lock_guard<std::mutex> lock(order_mutex);
    TORCH_CHECK(freed_too_early.empty(), std::exchange(freed_too_early, {}));
    Clock& clock = clocks[stream_];
    join(clock, clock_of_host);
    operation_ = ++clock[stream_];
    clock_ = clock;
  }

  void read(Uses& uses) {
    std::lock_guard<std::mutex> lock(order_mutex);
    check_write(uses, "reads");
    uses.reads[stream_] = operation_;
  }

  void write(Uses& uses) {
    std::lock_guard<std::mutex> lock(order_mutex);
    check_write(uses, "writes");
    for (const auto& [reader, operation] : uses.reads) {
      check(reader, operation, "writes", "reads");
    }
    uses.reads.clear();
    uses.last_write = Use{stream_, operation_};
  }

 private:
  void check_write(const Uses& uses, const char* verb) const {
    if (uses.last_write.has_value()) {
      check(uses.last_write->stream, uses.last_write->operation, verb, "has written");
    }
  }

  void check(const StreamName& other, int64_t operation, const char* verb, const char* other_verb) const {
    TORCH_CHECK(
        has_seen(clock_, other, operation), "Streams in disorder: ", stream_.text(), " ", verb, " a tensor that ",
        other.text(), " ", other_verb, ", without a wait between them (wait_stream, an event, synchronize). (in ",
        name_, ")");
  }

  StreamName stream_;
  std::string name_;
  int64_t operation_;
  Clock clock_;
};

// Memory returns to its owner. Whoever else uses it must have been waited for, or be recorded.
inline void note_freed(const Uses& uses) {
  std::lock_guard<std::mutex> lock(order_mutex);
  Clock clock = clocks[uses.owner];
  join(clock, clock_of_host);
  Clock users = uses.reads;
  if (uses.last_write.has_value()) {
    auto& operation = users[uses.last_write->stream];
    operation = std::max(operation, uses.last_write->operation);
  }
  for (const auto& [user, operation] : users) {
    if (user == uses.owner || uses.recorded.count(user) > 0 || has_seen(clock, user, operation)) {
      continue;
    }
    freed_too_early = "Memory of " + uses.owner.text() + " was freed while " + user.text() +
        " still uses it, without a wait between them, and without `record_stream`.";
  }
}

}  // namespace simulated
