#include "memory.h"

#include "timeline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <tuple>

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

int64_t room(const Memory& memory) {
  auto costs = Timeline::get().costs();
  return costs.memory_bytes - costs.context_bytes - memory.beside - memory.reserved;
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
  if (room(memory) < size) {
    ++memory.retries;
    give_back(device);
  }
  if (room(memory) < size) {
    ++memory.failures;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "MUSA out of memory. Tried to allocate ", bytes, " bytes. GPU ", index,
        " has a total capacity of ", Timeline::get().costs().memory_bytes, " bytes of which ", room(memory),
        " bytes is free. Of the allocated memory ", memory.current, " bytes is allocated by PyTorch, and ",
        memory.reserved - memory.current, " bytes is reserved by PyTorch but unallocated.");
  }
  memory.reserved += size;
  memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
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
}

bool take_beside(int index, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  auto& memory = of(index).memory;
  if (room(memory) < bytes) return false;  // what torch has cached is out of a library's reach
  memory.beside += bytes;
  return true;
}

void give_beside(int device, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  of(device).memory.beside -= bytes;
}

Memory memory_of(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return of(device).memory;
}

int64_t free_bytes(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return room(of(device).memory);
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  auto& memory = of(device).memory;
  memory.peak = memory.current;
  memory.reserved_peak = memory.reserved;
}

}  // namespace simmusa
