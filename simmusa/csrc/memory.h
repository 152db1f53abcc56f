// The memory of a simulated device: a caching allocator over segments, as torch_musa's (MUSACachingAllocator.cpp:
// pieces of 512 bytes, segments of 2, 20 or multiples of 2 MiB), beside it the context and communicators' buffers.
//
// Only the books are kept here: the bytes of a tensor are the host's, whatever piece stands for them.
#pragma once

#include <cstdint>
#include <set>

namespace simmusa {

struct Memory {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0, blocks = 0;  // of the pieces that tensors hold
  int64_t reserved = 0, reserved_peak = 0, retries = 0, failures = 0;
  int64_t beside = 0;  // communicators' buffers
};

// A stretch of a segment; the free ones of a stream wait to be taken again by work of that stream.
struct Piece {
  int device;
  uint64_t stream;
  bool large;
  int64_t bytes;
  uint64_t place;  // in the order of addresses
  bool taken = false;
  Piece *before = nullptr, *after = nullptr;
};

// This process uses the device from now on: its context is there.
void enter(int device);

// OutOfMemoryError where the device has no room, even after what is cached went back to it.
Piece* take_piece(int device, uint64_t stream, int64_t bytes);
void give_piece(Piece* piece);
void give_back_segments(int device);

// Memory that the driver gives to a library; false where there is none left.
bool take_beside(int device, int64_t bytes);
void give_beside(int device, int64_t bytes);

Memory memory_of(int device);
int64_t free_bytes(int device);
void reset_peak(int device);

}  // namespace simmusa
