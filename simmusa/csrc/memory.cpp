#include "memory.h"

#include "timeline.h"

#include <c10/util/Exception.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace simmusa {

namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kPieceBytes = 512, kSmallBytes = kMiB, kSmallSegment = 2 * kMiB, kLargeSegment = 20 * kMiB;

int64_t rounded(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// The smallest piece that is large enough comes first among those of a stream.
struct BestFit {
  bool operator()(const Piece* one, const Piece* other) const {
    return std::tie(one->stream, one->bytes, one->place) < std::tie(other->stream, other->bytes, other->place);
  }
};
using Free = std::set<Piece*, BestFit>;

struct Device {
  Memory memory;
  Free small, large;
  uint64_t next_place = 0;

  Free& pool(bool is_large) { return is_large ? large : small; }
};

std::mutex mutex;
Device& of(int device) {
  static auto* devices = new Device[kMaxDevices];  // never destroyed: tensors may outlive main
  return devices[device];
}

// The processes on a device, if $SIMMUSA_SHARED names a folder: the file DEVICE.PID has the bytes of one, who holds a
// lock on it. The kernel drops the lock when the process has ended, and only then is its memory free.
class Processes {
 public:
  explicit Processes(int device) : device_(std::to_string(device)) {}

  // This process holds so many bytes.
  void hold(int64_t bytes) {
    if (!folder()) return;
    if (own_ < 0) own_ = lock(own_name(), true);
    TORCH_CHECK(pwrite(own_, &bytes, sizeof bytes, 0) == sizeof bytes, "SIMMUSA_SHARED: cannot write to ", folder());
  }

  bool know_this_one() const { return own_ >= 0; }

  int64_t held_by_others() const {
    if (!folder()) return 0;
    int64_t sum = 0;
    auto* listing = opendir(folder());
    TORCH_CHECK(listing, "SIMMUSA_SHARED: cannot read ", folder());
    while (auto* entry = readdir(listing)) {
      std::string name = entry->d_name;
      if (name.rfind(device_ + ".", 0) != 0 || name == own_name()) continue;
      int file = openat(dirfd(listing), name.c_str(), O_RDONLY | O_CLOEXEC);
      auto whole = range(F_RDLCK);
      int64_t bytes = 0;
      bool lives = file >= 0 && fcntl(file, F_GETLK, &whole) == 0 && whole.l_type != F_UNLCK;
      if (lives && pread(file, &bytes, sizeof bytes, 0) == sizeof bytes) sum += bytes;
      if (file >= 0) close(file);
    }
    closedir(listing);
    return sum;
  }

  // Only one process at a time looks for room and takes it.
  class Turn {
   public:
    explicit Turn(const Processes& all) : file_(folder() ? all.lock(all.device_, false) : -1) {}
    ~Turn() {
      if (file_ >= 0) close(file_);
    }
    Turn(const Turn&) = delete;

   private:
    int file_;
  };

 private:
  static const char* folder() { return std::getenv("SIMMUSA_SHARED"); }
  static struct flock range(short type) {
    struct flock whole = {};
    whole.l_type = type;
    whole.l_whence = SEEK_SET;
    return whole;
  }
  std::string own_name() const { return device_ + "." + std::to_string(getpid()); }

  int lock(const std::string& name, bool empty) const {
    mkdir(folder(), 0700);
    auto path = std::string(folder()) + "/" + name;
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (empty ? O_TRUNC : 0), 0600);
    auto whole = range(F_WRLCK);
    TORCH_CHECK(file >= 0 && fcntl(file, F_SETLKW, &whole) == 0, "SIMMUSA_SHARED: cannot lock ", path);
    return file;
  }

  std::string device_;
  int own_ = -1;
};

Processes& processes_of(int device) {
  static auto* all = [] {
    auto* made = new std::vector<Processes>;
    for (int index = 0; index < kMaxDevices; ++index) made->emplace_back(index);
    return made;
  }();
  return (*all)[device];
}

void tell(int device) {
  auto& memory = of(device).memory;
  processes_of(device).hold(Timeline::get().costs().context_bytes + memory.beside + memory.reserved);
}

int64_t room(int device) {
  auto costs = Timeline::get().costs();
  auto& memory = of(device).memory;
  auto own = costs.context_bytes + memory.beside + memory.reserved;
  return costs.memory_bytes - own - processes_of(device).held_by_others();
}

void give_back(Device& device) {
  for (auto* pool : {&device.small, &device.large})
    for (auto each = pool->begin(); each != pool->end();) {
      auto* piece = *each;
      bool whole = !piece->before && !piece->after;
      if (whole) {
        device.memory.reserved -= piece->bytes;
        delete piece;
      }
      each = whole ? pool->erase(each) : std::next(each);
    }
}

Piece* new_segment(Device& device, int index, uint64_t stream, int64_t bytes, bool large) {
  auto size = !large ? kSmallSegment : bytes < kLargeSegment / 2 ? kLargeSegment : rounded(bytes, kSmallSegment);
  auto& memory = device.memory;
  Processes::Turn turn(processes_of(index));
  if (room(index) < size) {
    ++memory.retries;
    give_back(device);
    tell(index);
  }
  if (room(index) < size) {
    ++memory.failures;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "MUSA out of memory. Tried to allocate ", bytes, " bytes. GPU ", index,
        " has a total capacity of ", Timeline::get().costs().memory_bytes, " bytes of which ", room(index),
        " bytes is free. Of the allocated memory ", memory.current, " bytes is allocated by PyTorch, and ",
        memory.reserved - memory.current, " bytes is reserved by PyTorch but unallocated.");
  }
  memory.reserved += size;
  memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
  tell(index);
  auto place = device.next_place;
  device.next_place += static_cast<uint64_t>(size);
  return new Piece{index, stream, large, size, place};
}

Piece* best_fit(Device& device, uint64_t stream, int64_t bytes, bool large) {
  auto& pool = device.pool(large);
  Piece wanted{0, stream, large, bytes, 0};
  auto found = pool.lower_bound(&wanted);
  if (found == pool.end() || (*found)->stream != stream) return nullptr;
  auto* piece = *found;
  pool.erase(found);
  return piece;
}

void split(Device& device, Piece* piece, int64_t bytes) {
  auto left = piece->bytes - bytes;
  if (piece->large ? left <= kSmallBytes : left < kPieceBytes) return;
  auto place = piece->place + static_cast<uint64_t>(bytes);
  auto* rest = new Piece{piece->device, piece->stream, piece->large, left, place, false, piece, piece->after};
  if (rest->after) rest->after->before = rest;
  piece->after = rest;
  piece->bytes = bytes;
  device.pool(piece->large).insert(rest);
}

// Joins `piece` with the free piece `next` behind it.
void join(Piece* piece, Piece* next) {
  piece->bytes += next->bytes;
  piece->after = next->after;
  if (piece->after) piece->after->before = piece;
  delete next;
}

}  // namespace

Piece* take_piece(int index, uint64_t stream, int64_t wanted) {
  std::lock_guard<std::mutex> guard(mutex);
  auto& device = of(index);
  auto bytes = rounded(wanted, kPieceBytes);
  bool large = bytes > kSmallBytes;
  auto* piece = best_fit(device, stream, bytes, large);
  if (!piece) piece = new_segment(device, index, stream, bytes, large);
  split(device, piece, bytes);
  piece->taken = true;
  auto& memory = device.memory;
  memory.current += piece->bytes;
  memory.allocated += piece->bytes;
  memory.blocks += 1;
  memory.peak = std::max(memory.peak, memory.current);
  return piece;
}

void give_piece(Piece* piece) {
  std::lock_guard<std::mutex> guard(mutex);
  auto& device = of(piece->device);
  device.memory.current -= piece->bytes;
  device.memory.freed += piece->bytes;
  device.memory.blocks -= 1;
  piece->taken = false;
  auto& pool = device.pool(piece->large);
  if (auto* next = piece->after; next && !next->taken) {
    pool.erase(next);
    join(piece, next);
  }
  if (auto* earlier = piece->before; earlier && !earlier->taken) {
    pool.erase(earlier);
    join(earlier, piece);
    piece = earlier;
  }
  pool.insert(piece);
}

void give_back_segments(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  give_back(of(device));
  tell(device);
}

void enter(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!processes_of(device).know_this_one()) tell(device);
}

bool take_beside(int index, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  Processes::Turn turn(processes_of(index));
  if (room(index) < bytes) return false;  // what torch has cached is out of a library's reach
  of(index).memory.beside += bytes;
  tell(index);
  return true;
}

void give_beside(int device, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  of(device).memory.beside -= bytes;
  tell(device);
}

Memory memory_of(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return of(device).memory;
}

int64_t free_bytes(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return room(device);
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  auto& memory = of(device).memory;
  memory.peak = memory.current;
  memory.reserved_peak = memory.reserved;
}

}  // namespace simmusa
