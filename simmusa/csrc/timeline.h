// Virtual time of a simulated device: one host clock per process, one clock per stream, and what has seen what.
//
// Time.   Launching work costs the host `launch_ns`; work starts at max(stream, host) and lasts what the cost model
//         says; only a synchronisation moves the host to a stream's time.
// Order.  Every stream numbers its work.  A vector clock (stream -> number) says which work is known to be finished
//         before the next one of a stream, or of the host, begins; events and synchronisations carry it.  An access
//         to memory that is not ordered after an earlier conflicting one is an error, whatever the clocks say.
#pragma once

#include "memory.h"

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simmusa {

using StreamKey = uint64_t;  // device and stream id
using Seen = std::map<StreamKey, uint64_t>;

constexpr int kMaxDevices = 64;
constexpr int64_t kPollNs = 1000;  // what asking an unfinished event costs the host: a polling loop ends

struct Costs {
  int64_t launch_ns = 0;
  int64_t kernel_ns = 0;
  std::map<std::string, double> flops_per_s;  // by dtype: fp32, tf32, bf16, ...; absent or 0: infinitely fast
  double bytes_per_s = 0;
  double host_bytes_per_s = 0;
  int64_t alpha_ns = 0;
  double link_bytes_per_s = 0;
  std::map<std::string, double> slow;  // factor by operation: aten::mm, mccl::allreduce, simmusa::copy
  double jitter = 0;                   // each duration times 1 + jitter x uniform(-1, 1)
  uint64_t seed = 0;
  int64_t burst_ns = 0;    // so long a device computes at its boost clock; 0: for ever
  double sustained = 1;    // factor of its kernels after that, until it has idled as long
  int64_t memory_bytes = int64_t{48} << 30;
  int64_t context_bytes = 0;
  int64_t communicator_bytes = 0;
  std::map<std::string, double> faults;  // by operation: the launch, from 1, that breaks its device
};

struct Access {
  int64_t begin, end;  // addresses
  StreamKey stream;
  uint64_t number;
};

// What a storage on the device keeps beside its bytes.
struct Block {
  void* data = nullptr;
  int64_t bytes = 0;
  int device = 0;
  Piece* piece = nullptr;  // what stands for it in the device's memory
  c10::intrusive_ptr<c10::StorageImpl> owner;  // set where a CPU kernel allocated the bytes
  std::vector<Access> writes, reads;
};

// A stretch of a block that one operation reads or writes.
struct Use {
  Block* block;
  int64_t begin, end;
  bool writes;
};

// A moment on a device: when, and what is finished by then.
struct Stamp {
  int64_t time_ns = 0;
  Seen seen;
};

struct TraceEntry {
  std::string name;
  StreamKey stream;
  int64_t start_ns, end_ns;
};

class Timeline {
 public:
  static Timeline& get();

  void set_costs(Costs costs);
  Costs costs();
  int64_t host_ns();
  int64_t stream_ns(StreamKey stream);

  // One piece of work: begin() launches it and checks the order of what it touches, finish() gives it its duration.
  void begin(StreamKey stream, const std::string& name, const std::vector<Use>& uses);
  void finish(StreamKey stream, const std::string& name, double duration_ns);

  // What the last work of a stream allocated for its result is written by it.
  void touched(StreamKey stream, const std::vector<Use>& made);

  // Communication: queued behind `from` on a stream of its own; its end is known once the other ranks have said when
  // they came.
  Stamp post(StreamKey from, StreamKey channel, const std::string& name, const std::vector<Use>& uses);
  int64_t complete(StreamKey channel, const std::string& name, int64_t ready_ns, int64_t duration_ns);
  int64_t duration_of(const std::string& name, double nominal_ns);

  Stamp record(StreamKey stream);
  void wait(StreamKey stream, const Stamp& stamp);
  void synchronize(const Stamp& stamp);
  void synchronize_stream(StreamKey stream);
  void synchronize_device(int device);
  bool query(const Stamp& stamp);

  // Work whose result the host sees only once it has synchronised with it.
  void defer(StreamKey stream, std::function<void()> deliver);

  void trace(bool on);
  std::vector<TraceEntry> traced();

 private:
  struct StreamState {
    int64_t time_ns = 0;
    uint64_t number = 0;
    Seen seen;
  };
  struct Heat {
    int64_t busy_ns = 0, end_ns = 0;
  };
  struct Deferred {
    StreamKey stream;
    uint64_t number;
    std::function<void()> deliver;
  };

  void count_launch(StreamKey stream, const std::string& name);
  void check(StreamKey stream, const Seen& seen, uint64_t number, const std::string& name, const std::vector<Use>& uses);
  double jittered(double nominal_ns);
  std::vector<std::function<void()>> see(const Seen& seen);
  static void run(const std::vector<std::function<void()>>& deliveries);

  std::mutex mutex_;
  Costs costs_;
  int64_t host_ns_ = 0;
  uint64_t draws_ = 0;
  std::map<std::string, int64_t> launches_;  // of the operations that break a device
  Seen host_seen_;
  std::map<StreamKey, StreamState> streams_;
  std::map<int, Heat> heat_;  // by device
  std::vector<Deferred> deferred_;
  bool tracing_ = false;
  std::vector<TraceEntry> trace_;
};

StreamKey key_of(const c10::Stream& stream);
inline int device_of(StreamKey stream) { return static_cast<int>(stream >> 32); }
std::string name_of(StreamKey stream);

// -- device.cpp
void set_device_count(int count);
int device_count();
int current_device();
void set_current_device(int index);
c10::Stream current_stream(int device);  // of this thread
void set_current_stream(int device, int64_t id);
// A stream for a communicator, and its way back: what a stream has seen of all others is kept for good, so that one for
// every communicator of a long session would take ever more memory and time.
StreamKey new_channel(int device);
void give_back_channel(StreamKey channel);
void require_own_process();         // a fork of a process that used the device cannot use it

c10::Allocator* allocator();
Block* block_of(const c10::Storage& storage);
// A device storage over the bytes of a CPU storage, counted as allocated.
c10::DataPtr adopt(const c10::Storage& cpu, int device);
void resize_storage(const c10::Storage& storage, size_t bytes);
bool is_pinned(const void* data);

// The next event that this thread records holds `stamp` instead of its stream's present state.
void record_next_as(const Stamp& stamp);

}  // namespace simmusa
