// mccl: a c10d backend over gloo.  The bytes travel by gloo; the time is the cost model's and the latest rank's.
//
// A collective starts when the last rank has come and the group's earlier communication has ended, and lasts
// alpha + bytes / bandwidth of the rank with most bytes.  The ranks say when they came by a second all-reduce
// (maximum) beside the one that moves the data.  A message starts when sender and receiver are both there, and ends
// for both when it is received.
#include "mccl.h"

#include "ops.h"

#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>

namespace simmusa {

namespace {

using at::Tensor;
using c10::intrusive_ptr;
using c10::IValue;
using c10::ivalue::Future;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;

Tensors cpu(const Tensors& tensors) {
  Tensors made;
  for (const auto& each : tensors) made.push_back(as_cpu(each));
  return made;
}

Lists cpu(const Lists& lists) {
  Lists made;
  for (const auto& each : lists) made.push_back(cpu(each));
  return made;
}

Tensors flat(const Lists& lists) {
  Tensors made;
  for (const auto& list : lists) made.insert(made.end(), list.begin(), list.end());
  return made;
}

int64_t total_bytes(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& each : tensors) bytes += bytes_of(each);
  return bytes;
}

int device_of(const Tensors& tensors) {
  for (const auto& each : tensors)
    if (each.defined() && each.is_privateuseone()) return each.get_device();
  return current_device();
}

double link_ns(int64_t bytes) {
  auto costs = Timeline::get().costs();
  auto per_s = costs.link_bytes_per_s;
  return static_cast<double>(costs.alpha_ns) + (per_s > 0 ? 1e9 * static_cast<double>(bytes) / per_s : 0);
}

// Factor of the link from one rank of a group to another.
double slowness_of(int from, int to) {
  auto costs = Timeline::get().costs();
  auto slow = costs.slow.find("mccl::link " + std::to_string(from) + " to " + std::to_string(to));
  return slow == costs.slow.end() ? 1.0 : slow->second;
}

// mccl reduces by sum, average, minimum, maximum and product; gloo does not average everywhere, so that is a sum
// divided afterwards.
bool averages(c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::AVG: op = c10d::ReduceOp::SUM; return true;
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::PRODUCT: return false;
    default: TORCH_CHECK(false, "mccl reduces by SUM, AVG, MIN, MAX and PRODUCT alone");
  }
}

struct Queue;

// One collective of a group, from its start on a rank to its end on all.
struct Collective {
  std::string name;
  StreamKey channel = 0;
  Stamp came;                       // when this rank queued it, and what is finished by its end
  Tensor moment;                    // (when, how long) of all ranks, by maximum
  Tensors outputs, alive;      // on the device; what gloo reads and writes
  std::function<void()> last;  // what remains to be done with the bytes that came
  std::atomic<int> missing{2};  // the data and the moment
  std::exception_ptr error;
  Stamp end;
  intrusive_ptr<Future> future;
  std::atomic<bool> let_go{false};  // the thread that finished it has none of its tensors any more
};

thread_local int finishing = 0;  // collectives that this thread is about to finish

// Collectives of one group end in the order in which they began, whichever gloo finishes first.
struct Queue {
  std::mutex mutex;
  std::deque<std::shared_ptr<Collective>> open;
  bool draining = false;

  // Without the lock while a collective is finished: what waits for it may begin another one at once.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    if (draining) return;  // that thread looks again before it stops
    draining = true;
    while (!open.empty() && open.front()->missing == 0) {
      auto done = open.front();
      open.pop_front();
      lock.unlock();
      ++finishing;
      finish(*done);
      --finishing;
      done->outputs.clear();
      done->future.reset();
      done->let_go = true;
      lock.lock();
    }
    draining = false;
  }

  static void finish(Collective& done) {
    if (done.error) {
      done.future->setError(done.error);
      return;
    }
    const auto* moment = done.moment.const_data_ptr<int64_t>();
    if (done.last) done.last();
    // gloo's threads drop what they used when they come to it: memory would be free at one moment or another.
    done.last = nullptr;
    for (const auto& each : done.alive) give_back(each);
    done.alive.clear();
    done.end = {Timeline::get().complete(done.channel, done.name, moment[0], moment[1]), done.came.seen};
    if (!done.outputs.empty()) record_next_as(done.end);
    done.future->markCompleted(IValue(c10::List<Tensor>(done.outputs)));
  }
};

class CollectiveWork final : public Work {
 public:
  CollectiveWork(std::shared_ptr<Collective> collective, c10d::OpType type, int device, bool blocks)
      : Work(-1, type),
        collective_(std::move(collective)),
        future_(collective_->future),
        outputs_(collective_->outputs),
        device_(device),
        blocks_(blocks) {}

  bool isCompleted() override {
    return future_->completed() && (future_->hasError() || Timeline::get().query(collective_->end));
  }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  // The current stream waits; the host goes on, but for a barrier.
  void synchronize() override {
    future_->waitAndThrow();
    // Else memory would be free at one moment or another, as threads happen to run.
    while (!finishing && !collective_->let_go) std::this_thread::yield();
    Timeline::get().wait(key_of(current_stream(device_)), collective_->end);
    if (blocks_) Timeline::get().synchronize(collective_->end);
  }
  void abort() override {}
  Tensors result() override { return outputs_; }
  intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Collective> collective_;
  intrusive_ptr<Future> future_;
  Tensors outputs_;
  int device_;
  bool blocks_;
};

// What each side tells the other about a message.
struct Side {
  int64_t posted_ns, lasts_ns;
  int64_t number;   // among the messages of its lane
  int64_t batched;  // 1 in a batch, which has the group's communicator; alone it has that of the two ranks
};

struct Message {
  std::string name;
  Stamp posted;
  Side mine{};
  Tensor told, heard;  // the two sides, as they travel
  Tensors alive;
  std::vector<intrusive_ptr<Work>> works;
  bool ended = false;
  Stamp end;
};

// Messages in their order: of a batch those of one direction between two ranks, which run beside those of the other;
// otherwise all between the two, one after the other.
struct Lane {
  std::mutex mutex;
  StreamKey channel = 0;
  int peer = 0;
  int64_t posted = 0;
  std::deque<std::shared_ptr<Message>> open;
  std::string error;

  // Ends every message up to this one, which blocks until the other side has come.
  void finish(const std::shared_ptr<Message>& wanted) {
    std::lock_guard<std::mutex> guard(mutex);
    while (!wanted->ended) {
      TORCH_CHECK(error.empty(), error);
      auto next = open.front();
      for (const auto& work : next->works) work->wait();
      open.pop_front();
      const auto* heard = next->heard.const_data_ptr<int64_t>();
      Side theirs{heard[0], heard[1], heard[2], heard[3]};
      error = disagreement(*next, theirs);
      TORCH_CHECK(error.empty(), error);
      auto ready_ns = std::max(next->mine.posted_ns, theirs.posted_ns);
      auto lasts_ns = std::max(next->mine.lasts_ns, theirs.lasts_ns);
      next->end = {Timeline::get().complete(channel, next->name, ready_ns, lasts_ns), next->posted.seen};
      for (const auto& each : next->alive) give_back(each);
      next->ended = true;
    }
  }

  // Two sides that are not at the same place of the same communicator wait for each other for ever.
  std::string disagreement(const Message& message, const Side& theirs) const {
    auto place = [](const Side& side) {
      return side.batched ? std::string("in a batch") : "alone as message " + std::to_string(side.number) + " of the two";
    };
    const auto& mine = message.mine;
    if (mine.batched == theirs.batched && (mine.batched || mine.number == theirs.number)) return "";
    return message.name + " with rank " + std::to_string(peer) + " is called " + place(mine) + " here and " +
        place(theirs) + " there: on a device both wait for ever; give them one order, or one batch";
  }
};

class MessageWork final : public Work {
 public:
  MessageWork(std::shared_ptr<Lane> lane, std::shared_ptr<Message> message, c10d::OpType type, int device)
      : Work(-1, type), lane_(std::move(lane)), message_(std::move(message)), device_(device) {}

  bool isCompleted() override {
    if (!message_->ended)
      for (const auto& work : message_->works)
        if (!work->isCompleted()) return false;
    lane_->finish(message_);
    return Timeline::get().query(message_->end);
  }
  bool isSuccess() const override { return message_->ended; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    lane_->finish(message_);
    Timeline::get().wait(key_of(current_stream(device_)), message_->end);
  }
  void abort() override {}

 private:
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Message> message_;
  int device_;
};

class ManyWorks final : public Work {
 public:
  explicit ManyWorks(std::vector<intrusive_ptr<Work>> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    for (const auto& work : works_)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    for (const auto& work : works_)
      if (!work->isSuccess()) return false;
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  void abort() override {}

 private:
  std::vector<intrusive_ptr<Work>> works_;
};

class Mccl final : public c10d::Backend {
 public:
  Mccl(intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}
  ~Mccl() override { give_back(); }

  const std::string getBackendName() const override { return "mccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void eagerConnectSingleDevice(at::Device) override {}
  // Communicators are destroyed by all of their ranks together: one that leaves by itself waits for the others.
  void shutdown() override {
    if (getSize() > 1) gloo_->barrier(c10d::BarrierOptions())->wait();
    give_back();
  }

  // What begins between the two is queued as ever and waited for together.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { together_ = std::vector<intrusive_ptr<Work>>(); }
  intrusive_ptr<Work> endCoalescing() override {
    auto works = std::move(together_);
    together_.reset();
    TORCH_CHECK(works, "mccl: endCoalescing without startCoalescing");
    return c10::make_intrusive<ManyWorks>(std::move(*works));
  }


  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto root = options.rootRank == getRank();
    return start("broadcast", c10d::OpType::BROADCAST, root ? tensors : Tensors{}, root ? Tensors{} : tensors, tensors, total_bytes(tensors), [&](Held& held) {
      held.outputs = cpu(tensors);
      return gloo_->broadcast(held.outputs, options);
    });
  }
  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto plain = options;
    bool average = averages(plain.reduceOp);
    return start("allreduce", c10d::OpType::ALLREDUCE, {}, tensors, tensors, total_bytes(tensors), [&](Held& held) {
      held.outputs = cpu(tensors);
      if (average) held.last = divide(held.outputs);
      return gloo_->allreduce(held.outputs, plain);
    });
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto plain = options;
    bool average = averages(plain.reduceOp);
    return start("allreduce", c10d::OpType::ALLREDUCE_COALESCED, {}, tensors, tensors, total_bytes(tensors), [&](Held& held) {
      held.outputs = cpu(tensors);
      if (average) held.last = divide(held.outputs);
      return gloo_->allreduce_coalesced(held.outputs, plain);
    });
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto plain = options;
    bool average = averages(plain.reduceOp);
    return start("reduce", c10d::OpType::REDUCE, {}, tensors, tensors, total_bytes(tensors), [&](Held& held) {
      held.outputs = cpu(tensors);
      if (average && options.rootRank == getRank()) held.last = divide(held.outputs);
      return gloo_->reduce(held.outputs, plain);
    });
  }
  intrusive_ptr<Work> allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto whole = flat(outputs);
    return start("allgather", c10d::OpType::ALLGATHER, inputs, whole, whole, total_bytes(whole), [&](Held& held) {
      held.inputs = cpu(inputs);
      held.lists = cpu(outputs);
      return gloo_->allgather(held.lists, held.inputs, options);
    });
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return start("allgather", c10d::OpType::_ALLGATHER_BASE, {input}, {output}, {output}, bytes_of(output), [&](Held& held) {
      held.outputs = {as_cpu(output)};
      held.inputs = {as_cpu(input)};
      return gloo_->_allgather_base(held.outputs[0], held.inputs[0], options);
    });
  }
  // One after the other on the group's stream: the last one's end is the end of all.
  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    intrusive_ptr<Work> last;
    for (size_t index = 0; index < outputs.size(); ++index) last = _allgather_base(outputs[index], inputs[index], options);
    return last;
  }
  intrusive_ptr<Work> gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto whole = flat(outputs);
    return start("gather", c10d::OpType::GATHER, inputs, whole, whole, total_bytes(inputs) * getSize(), [&](Held& held) {
      held.inputs = cpu(inputs);
      held.lists = cpu(outputs);
      return gloo_->gather(held.lists, held.inputs, options);
    });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return start("scatter", c10d::OpType::SCATTER, flat(inputs), outputs, outputs, total_bytes(outputs) * getSize(), [&](Held& held) {
      held.outputs = cpu(outputs);
      held.lists = cpu(inputs);
      return gloo_->scatter(held.outputs, held.lists, options);
    });
  }
  intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto whole = flat(inputs);
    return start(
        "reduce_scatter", c10d::OpType::REDUCE_SCATTER, whole, outputs, outputs, total_bytes(whole), [&](Held& held) {
          Tensors parts;
          for (const auto& each : cpu(whole)) parts.push_back(each.reshape(-1));
          return reduce_and_keep(held, at::cat(parts), as_cpu(outputs[0]), options);
        });
  }
  intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start(
        "reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, {output}, bytes_of(input),
        [&](Held& held) { return reduce_and_keep(held, as_cpu(input).clone().reshape(-1), as_cpu(output), options); });
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    intrusive_ptr<Work> last;
    for (size_t index = 0; index < outputs.size(); ++index)
      last = _reduce_scatter_base(outputs[index], inputs[index], options);
    return last;
  }
  intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto bytes = std::max(bytes_of(output), bytes_of(input));
    return start("alltoall", c10d::OpType::ALLTOALL_BASE, {input}, {output}, {output}, bytes, [&](Held& held) {
      held.outputs = {as_cpu(output)};
      held.inputs = {as_cpu(input)};
      return gloo_->alltoall_base(held.outputs[0], held.inputs[0], output_sizes, input_sizes, options);
    });
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    // As ProcessGroupMCCL: without a device of an earlier communication it takes rank % device_count, which on several
    // hosts is another rank's device.
    TORCH_CHECK(
        getSize() == 1 || knows_device_ || !options.device_ids.empty(),
        "mccl: a barrier is the first communication of this group, and which device is this rank's is guessed: "
        "communicate a tensor first, or give device_ids");
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    return start("barrier", c10d::OpType::BARRIER, {}, {}, {}, 0, [&](Held&) { return gloo_->barrier(plain); });
  }
  intrusive_ptr<Work> send(Tensors& tensors, int peer, int tag) override { return message(tensors, peer, tag, true); }
  intrusive_ptr<Work> recv(Tensors& tensors, int peer, int tag) override { return message(tensors, peer, tag, false); }

 private:
  // What gloo reads and writes: it must outlive the call.
  struct Held {
    Tensors inputs, outputs;
    Lists lists;
    std::function<void()> last;
  };

  std::function<void()> divide(const Tensors& tensors) {
    return [tensors, ranks = getSize()] {
      for (auto each : tensors) each.div_(ranks);
    };
  }

  // gloo's own reduce_scatter tells nobody when it is done: all ranks reduce everything and keep their part.
  intrusive_ptr<Work> reduce_and_keep(
      Held& held, const Tensor& everything, const Tensor& output, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions plain;
    plain.reduceOp = options.reduceOp;
    plain.timeout = options.timeout;
    bool average = averages(plain.reduceOp);
    held.outputs = {everything};
    held.last = [everything, output, average, rank = getRank(), ranks = getSize()] {
      auto mine = everything.narrow(0, rank * output.numel(), output.numel());
      if (average) mine.div_(ranks);
      output.copy_(mine.view(output.sizes()));
    };
    return gloo_->allreduce(held.outputs, plain);
  }

  intrusive_ptr<Work> begun(intrusive_ptr<Work> work) {
    if (together_) together_->push_back(work);
    return work;
  }

  template <typename Post>
  intrusive_ptr<Work> start(
      const char* name, c10d::OpType type, const Tensors& reads, const Tensors& writes, const Tensors& outputs,
      int64_t bytes, Post&& post) {
    knows_device_ = knows_device_ || !writes.empty() || !reads.empty();
    int device = writes.empty() && reads.empty() ? current_device() : device_of(writes.empty() ? reads : writes);
    auto collective = std::make_shared<Collective>();
    collective->name = std::string("mccl::") + name;
    collective->channel = channel(device);
    collective->came = queue_up(device, collective->channel, collective->name, reads, writes);
    for (const auto& each : outputs)
      if (each.defined() && each.is_privateuseone()) collective->outputs.push_back(each);
    auto lasts_ns = Timeline::get().duration_of(collective->name, link_ns(bytes));
    collective->moment = at::tensor({collective->came.time_ns, lasts_ns}, at::kLong);
    collective->future = c10::make_intrusive<Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device))});
    std::lock_guard<std::mutex> guard(start_mutex_);
    {
      std::lock_guard<std::mutex> queue_guard(queue_->mutex);
      queue_->open.push_back(collective);
    }
    Held held;
    auto data = post(held);
    collective->last = std::move(held.last);
    for (auto* list : {&held.inputs, &held.outputs})
      collective->alive.insert(collective->alive.end(), list->begin(), list->end());
    auto listed = flat(held.lists);
    collective->alive.insert(collective->alive.end(), listed.begin(), listed.end());
    Tensors moment{collective->moment};
    c10d::AllreduceOptions latest;
    latest.reduceOp = c10d::ReduceOp::MAX;
    auto clock = gloo_->allreduce(moment, latest);
    auto begun_here = c10::make_intrusive<CollectiveWork>(collective, type, device, type == c10d::OpType::BARRIER);
    for (const auto& work : {data, clock})
      work->getFuture()->addCallback([collective, queue = queue_, work](Future& future) {
        if (future.hasError()) collective->error = future.exception_ptr();
        if (--collective->missing == 0) queue->drain();
      });
    return begun(begun_here);
  }

  static Stamp queue_up(
      int device, StreamKey channel, const std::string& name, const Tensors& reads, const Tensors& writes) {
    std::vector<Use> uses;
    for (const auto& each : reads) add_use(uses, each, false);
    for (const auto& each : writes) add_use(uses, each, true);
    return Timeline::get().post(key_of(current_stream(device)), channel, name, uses);
  }

  // A communicator: a queue of work and buffers beside what torch allocates.  They belong to connections with peers: a
  // group of one rank has none, and its collectives are copies (ncclLaunchOneRank in NCCL's enqueue.cc).
  StreamKey communicator(int device) {
    auto bytes = getSize() > 1 ? Timeline::get().costs().communicator_bytes : 0;
    TORCH_CHECK_WITH(
        DistBackendError, take_beside(device, bytes), "MCCL error: unhandled musa error\nmcclUnhandledMusaError: Call to "
        "MUSA function failed.\nLast error:\nFailed to MUSA calloc ", bytes, " bytes");
    buffers_.emplace_back(device, bytes);
    return new_channel(device);
  }

  void give_back() {
    std::lock_guard<std::mutex> guard(start_mutex_);
    for (const auto& [device, bytes] : buffers_) give_beside(device, bytes);
    buffers_.clear();
    for (const auto& [device, channel] : channels_) give_back_channel(channel);
    channels_.clear();
    for (const auto& [which, lane] : lanes_) give_back_channel(lane->channel);
    lanes_.clear();
  }

  StreamKey channel(int device) {
    std::lock_guard<std::mutex> guard(start_mutex_);
    auto& mine = channels_[device];
    if (!mine) mine = communicator(device);
    return mine;
  }

  // Batches use the group's communicator; two ranks that exchange single messages make one of their own.
  std::shared_ptr<Lane> lane(int device, int peer, bool sends) {
    bool batched = together_.has_value();
    if (batched) channel(device);
    std::lock_guard<std::mutex> guard(start_mutex_);
    auto& mine = lanes_[{peer, batched, batched && sends}];
    if (!mine) {
      mine = std::make_shared<Lane>();
      mine->peer = peer;
      mine->channel = batched ? new_channel(device) : communicator(device);
    }
    return mine;
  }

  // Data under a tag of its own, and beside it two that tell each side what the other knows.
  intrusive_ptr<Work> message(Tensors& tensors, int peer, int tag, bool sends) {
    TORCH_CHECK(peer >= 0, "mccl receives from a named rank alone");
    knows_device_ = true;
    int device = device_of(tensors);
    auto lane = this->lane(device, peer, sends);
    auto made = std::make_shared<Message>();
    made->name = sends ? "mccl::send" : "mccl::recv";
    made->posted =
        queue_up(device, lane->channel, made->name, sends ? tensors : Tensors{}, sends ? Tensors{} : tensors);
    made->alive = cpu(tensors);
    auto usual_ns = link_ns(total_bytes(tensors)) * slowness_of(sends ? getRank() : peer, sends ? peer : getRank());
    auto lasts_ns = Timeline::get().duration_of(made->name, usual_ns);
    std::lock_guard<std::mutex> guard(lane->mutex);
    made->mine = {made->posted.time_ns, lasts_ns, ++lane->posted, together_.has_value() ? 1 : 0};
    const auto& [posted_ns, nominal_ns, number, batched] = made->mine;
    made->told = at::tensor({posted_ns, nominal_ns, number, batched}, at::kLong);
    made->heard = at::zeros({4}, at::kLong);
    Tensors told{made->told}, heard{made->heard};
    auto from_sender = 3 * tag + 1, from_receiver = 3 * tag + 2;
    made->works = {
        gloo_->send(told, peer, sends ? from_sender : from_receiver),
        gloo_->recv(heard, peer, sends ? from_receiver : from_sender),
        sends ? gloo_->send(made->alive, peer, 3 * tag) : gloo_->recv(made->alive, peer, 3 * tag)};
    lane->open.push_back(made);
    auto type = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
    return begun(c10::make_intrusive<MessageWork>(lane, made, type, device));
  }

  intrusive_ptr<c10d::Backend> gloo_;
  bool knows_device_ = false;  // a tensor has told which device is this rank's
  std::mutex start_mutex_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::optional<std::vector<intrusive_ptr<Work>>> together_;
  std::map<int, StreamKey> channels_;
  std::map<std::tuple<int, bool, bool>, std::shared_ptr<Lane>> lanes_;
  std::vector<std::pair<int, int64_t>> buffers_;  // of communicators, by device
};

}  // namespace

intrusive_ptr<c10d::Backend> make_mccl(intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
  return c10::make_intrusive<Mccl>(std::move(gloo), rank, size);
}

}  // namespace simmusa
