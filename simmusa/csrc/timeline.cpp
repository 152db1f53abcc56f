#include "timeline.h"

#include "refusals.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace simmusa {

namespace {

void merge(Seen& into, const Seen& from) {
  for (const auto& [stream, number] : from) {
    auto& mine = into[stream];
    mine = std::max(mine, number);
  }
}

bool covers(const Seen& seen, const Access& access) {
  auto found = seen.find(access.stream);
  return found != seen.end() && found->second >= access.number;
}

bool inside(const Access& inner, const Use& outer) { return inner.begin >= outer.begin && inner.end <= outer.end; }

bool meets(const Access& access, const Use& use) { return access.begin < use.end && use.begin < access.end; }

// splitmix64: a number per draw that depends on the seed and the draw's index alone.
double uniform(uint64_t seed, uint64_t draw) {
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + draw * 0xBF58476D1CE4E5B9ull + 0x94D049BB133111EBull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) / 9007199254740992.0 * 2 - 1;
}

}  // namespace

Timeline& Timeline::get() {
  static auto* timeline = new Timeline;  // never destroyed: streams of other threads may outlive main
  return *timeline;
}

void Timeline::set_costs(Costs costs) {
  std::lock_guard<std::mutex> guard(mutex_);
  costs_ = std::move(costs);
  draws_ = 0;
  launches_.clear();
}

Costs Timeline::costs() {
  std::lock_guard<std::mutex> guard(mutex_);
  return costs_;
}

int64_t Timeline::host_ns() {
  std::lock_guard<std::mutex> guard(mutex_);
  return host_ns_;
}

int64_t Timeline::stream_ns(StreamKey stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  return streams_[stream].time_ns;
}

double Timeline::jittered(double nominal_ns) {
  if (costs_.jitter == 0) return nominal_ns;
  return nominal_ns * (1 + costs_.jitter * uniform(costs_.seed, draws_++));
}

void Timeline::check(
    StreamKey stream, const Seen& seen, uint64_t number, const std::string& name, const std::vector<Use>& uses) {
  for (const auto& use : uses) {
    auto refuse = [&](const Access& earlier, const char* did) {
      if (earlier.stream == stream || !meets(earlier, use) || covers(seen, earlier)) return;
      TORCH_CHECK(
          false, name, " on ", name_of(stream), (use.writes ? " writes" : " reads"), " memory that ",
          name_of(earlier.stream), " ", did,
          ", and nothing orders the two; wait for an event of that stream, or for the communication's work");
    };
    for (const auto& write : use.block->writes) refuse(write, "wrote");
    if (use.writes)
      for (const auto& read : use.block->reads) refuse(read, "read");
  }
  for (const auto& use : uses) {
    auto& block = *use.block;
    auto settled = [&](const Access& access) { return covers(host_seen_, access) || (use.writes && inside(access, use)); };
    auto drop = [](std::vector<Access>& list, auto&& rule) {
      list.erase(std::remove_if(list.begin(), list.end(), rule), list.end());
    };
    drop(block.writes, settled);
    drop(block.reads, [&](const Access& access) {
      return settled(access) || (access.stream == stream && inside(access, use));
    });
    (use.writes ? block.writes : block.reads).push_back({use.begin, use.end, stream, number});
  }
}

// The launch itself is as any other: what comes after it finds the device broken.
void Timeline::count_launch(StreamKey stream, const std::string& name) {
  auto found = costs_.faults.find(name);
  if (found != costs_.faults.end() && ++launches_[name] == static_cast<int64_t>(found->second))
    break_device(device_of(stream), "an illegal memory access was encountered");
}

void Timeline::begin(StreamKey stream, const std::string& name, const std::vector<Use>& uses) {
  require_sound(device_of(stream));
  std::lock_guard<std::mutex> guard(mutex_);
  count_launch(stream, name);
  auto& state = streams_[stream];
  host_ns_ += costs_.launch_ns;
  merge(state.seen, host_seen_);
  check(stream, state.seen, state.number + 1, name, uses);
  ++state.number;
  state.seen[stream] = state.number;
  state.time_ns = std::max(state.time_ns, host_ns_);
}

int64_t Timeline::duration_of(const std::string& name, double nominal_ns) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto slow = costs_.slow.find(name);
  if (slow != costs_.slow.end()) nominal_ns *= slow->second;
  return std::llround(jittered(nominal_ns));
}

void Timeline::finish(StreamKey stream, const std::string& name, double duration_ns) {
  auto lasts_ns = duration_of(name, duration_ns);
  std::lock_guard<std::mutex> guard(mutex_);
  auto& state = streams_[stream];
  if (costs_.burst_ns > 0) {
    auto& heat = heat_[device_of(stream)];
    if (state.time_ns - heat.end_ns >= costs_.burst_ns) heat.busy_ns = 0;
    if (heat.busy_ns >= costs_.burst_ns) lasts_ns = std::llround(static_cast<double>(lasts_ns) * costs_.sustained);
    heat.busy_ns += lasts_ns;
    heat.end_ns = state.time_ns + lasts_ns;
  }
  state.time_ns += lasts_ns;
  if (tracing_) trace_.push_back({name, stream, state.time_ns - lasts_ns, state.time_ns});
}

void Timeline::touched(StreamKey stream, const std::vector<Use>& made) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& use : made) use.block->writes.push_back({use.begin, use.end, stream, streams_[stream].number});
}

Stamp Timeline::post(StreamKey from, StreamKey channel, const std::string& name, const std::vector<Use>& uses) {
  require_sound(device_of(from));
  std::lock_guard<std::mutex> guard(mutex_);
  count_launch(from, name);
  auto& caller = streams_[from];
  auto& state = streams_[channel];
  host_ns_ += costs_.launch_ns;
  merge(caller.seen, host_seen_);
  merge(state.seen, caller.seen);
  check(channel, state.seen, state.number + 1, name, uses);
  ++state.number;
  state.seen[channel] = state.number;
  return {std::max(caller.time_ns, host_ns_), state.seen};
}

int64_t Timeline::complete(StreamKey channel, const std::string& name, int64_t ready_ns, int64_t duration_ns) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto& state = streams_[channel];
  auto start_ns = std::max(state.time_ns, ready_ns);
  state.time_ns = start_ns + duration_ns;
  if (tracing_) trace_.push_back({name, channel, start_ns, state.time_ns});
  return state.time_ns;
}

Stamp Timeline::record(StreamKey stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto& state = streams_[stream];
  merge(state.seen, host_seen_);
  state.time_ns = std::max(state.time_ns, host_ns_);
  return {state.time_ns, state.seen};
}

void Timeline::wait(StreamKey stream, const Stamp& stamp) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto& state = streams_[stream];
  state.time_ns = std::max(state.time_ns, stamp.time_ns);
  merge(state.seen, stamp.seen);
}

std::vector<std::function<void()>> Timeline::see(const Seen& seen) {
  merge(host_seen_, seen);
  std::vector<std::function<void()>> due;
  std::vector<Deferred> rest;
  for (auto& each : deferred_) {
    auto found = host_seen_.find(each.stream);
    if (found != host_seen_.end() && found->second >= each.number)
      due.push_back(std::move(each.deliver));
    else
      rest.push_back(std::move(each));
  }
  deferred_ = std::move(rest);
  return due;
}

void Timeline::run(const std::vector<std::function<void()>>& deliveries) {
  for (const auto& deliver : deliveries) deliver();
}

void Timeline::synchronize(const Stamp& stamp) {
  for (const auto& [stream, number] : stamp.seen) require_sound(device_of(stream));
  std::vector<std::function<void()>> due;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    host_ns_ = std::max(host_ns_, stamp.time_ns);
    due = see(stamp.seen);
  }
  run(due);
}

void Timeline::synchronize_stream(StreamKey stream) {
  require_sound(device_of(stream));
  Stamp stamp;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& state = streams_[stream];
    stamp = {state.time_ns, state.seen};
  }
  synchronize(stamp);
}

void Timeline::synchronize_device(int device) {
  require_sound(device);
  std::vector<StreamKey> streams;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& [stream, state] : streams_)
      if (device_of(stream) == device) streams.push_back(stream);
  }
  for (auto stream : streams) synchronize_stream(stream);
}

bool Timeline::query(const Stamp& stamp) {
  for (const auto& [stream, number] : stamp.seen) require_sound(device_of(stream));
  std::vector<std::function<void()>> due;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (stamp.time_ns > host_ns_) {
      host_ns_ += kPollNs;
      return false;
    }
    due = see(stamp.seen);
  }
  run(due);
  return true;
}

void Timeline::defer(StreamKey stream, std::function<void()> deliver) {
  std::lock_guard<std::mutex> guard(mutex_);
  deferred_.push_back({stream, streams_[stream].number, std::move(deliver)});
}

void Timeline::trace(bool on) {
  std::lock_guard<std::mutex> guard(mutex_);
  tracing_ = on;
  trace_.clear();
}

std::vector<TraceEntry> Timeline::traced() {
  std::lock_guard<std::mutex> guard(mutex_);
  return trace_;
}

StreamKey key_of(const c10::Stream& stream) {
  return (static_cast<StreamKey>(stream.device_index()) << 32) | static_cast<StreamKey>(stream.id());
}

std::string name_of(StreamKey stream) {
  auto id = stream & 0xffffffffull;
  auto device = "musa:" + std::to_string(stream >> 32);
  if (id == 0) return "the default stream of " + device;
  return (id >= (1u << 20) ? "communicator " + std::to_string(id - (1u << 20)) : "stream " + std::to_string(id)) +
      " of " + device;
}

}  // namespace simmusa
