// A hash map from ids to table indices, in contiguous memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace prefixpack {

// Open addressing with linear probing. Ids are not negative, and none is ever erased: maps are cleared as a whole.
class IdMap {
 public:
  size_t size() const { return size_; }
  // The index of an id, or -1.
  int32_t find(int64_t id) const {
    if (entries_.empty()) return -1;
    const Entry& entry = entries_[position_of(id)];
    return entry.id == id ? entry.index : -1;
  }
  // Adds an id with `index` unless it is known. Returns its index and whether it was added.
  std::pair<int32_t, bool> insert(int64_t id, int32_t index) {
    if (2 * (size_ + 1) > entries_.size()) resize(entries_.empty() ? kMinEntries : 2 * entries_.size());
    Entry& entry = entries_[position_of(id)];
    if (entry.id == id) return {entry.index, false};
    entry = {id, index};
    ++size_;
    return {index, true};
  }
  void reserve(size_t ids) {
    size_t entries = kMinEntries;
    while (entries < 2 * ids) entries *= 2;
    if (entries > entries_.size()) resize(entries);
  }
  void clear() {
    entries_.clear();
    size_ = 0;
  }

 private:
  struct Entry {
    int64_t id = -1;
    int32_t index = -1;
  };
  static constexpr size_t kMinEntries = 16;

  // Index of the id's entry, or of the free one where it belongs. At least half of the entries are free.
  size_t position_of(int64_t id) const {
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
    const size_t mask = entries_.size() - 1;
    size_t position = static_cast<uint64_t>(id) * kFactor >> 32 & mask;
    while (entries_[position].id != id && entries_[position].id >= 0) position = (position + 1) & mask;
    return position;
  }
  void resize(size_t entries) {
    std::vector<Entry> before(entries);
    before.swap(entries_);
    for (const Entry& entry : before) {
      if (entry.id >= 0) entries_[position_of(entry.id)] = entry;
    }
  }

  std::vector<Entry> entries_;
  size_t size_ = 0;
};

}  // namespace prefixpack
