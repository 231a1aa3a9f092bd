// Arguments and results of operators: torch's tensors, through AOTInductor's C interface.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "vectors_cpu.h"

namespace ostinato {

// Elements in bfloat16 if `narrow`, else in float32.
struct Array {
  void* data;
  bool narrow;

  float operator[](int64_t i) const { return narrow ? from_bfloat16(((bfloat16*)data)[i]) : ((float*)data)[i]; }
  void put(int64_t i, float x) const {
    if (narrow)
      ((bfloat16*)data)[i] = to_bfloat16(x);
    else
      ((float*)data)[i] = x;
  }
  Floats load(int64_t i) const { return narrow ? ostinato::load((bfloat16*)data + i) : ostinato::load((float*)data + i); }
  void store(int64_t i, Floats x) const {
    if (narrow)
      ostinato::store((bfloat16*)data + i, x);
    else
      ostinato::store((float*)data + i, x);
  }
  // Loads the first `count` lanes; the other lanes are zeros.
  Floats load(int64_t i, int64_t count) const {
    if (count >= LANES) return load(i);
    float lanes[LANES] = {};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = (*this)[i + lane];
    return ostinato::load(lanes);
  }
  void store(int64_t i, Floats x, int64_t count) const {
    if (count >= LANES) return store(i, x);
    float lanes[LANES];
    ostinato::store(lanes, x);
    for (int64_t lane = 0; lane < count; ++lane) put(i + lane, lanes[lane]);
  }
  void clear(int64_t i, int64_t count) const { std::memset(from(i).data, 0, count * (narrow ? 2 : 4)); }
  Array from(int64_t i) const { return {(char*)data + i * (narrow ? 2 : 4), narrow}; }
};

inline float dot(const Array& x, const Array& y, int64_t count) {
  Floats total = zeros();
  for (int64_t i = 0; i < count; i += LANES) total = fma(x.load(i, count - i), y.load(i, count - i), total);
  return sum(total);
}

inline bool is_narrow(int32_t dtype) { return dtype == aoti_torch_dtype_bfloat16(); }

// A contiguous tensor. This class does not own its memory.
struct Tensor {
  void* data = nullptr;
  const int64_t* sizes = nullptr;
  int32_t dtype = 0;
  int64_t dims = 0;

  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) {
    int64_t* found = nullptr;
    aoti_torch_get_data_ptr(handle, &data);
    aoti_torch_get_sizes(handle, &found);
    aoti_torch_get_dtype(handle, &dtype);
    aoti_torch_get_dim(handle, &dims);
    sizes = found;
  }
  // An operator's optional argument; an empty tensor if it is not given.
  explicit Tensor(const AtenTensorHandle* handle) : Tensor(handle ? Tensor(*handle) : Tensor()) {}

  explicit operator bool() const { return data != nullptr; }
  int64_t size(int64_t dim) const { return sizes[dim < 0 ? dim + dims : dim]; }
  Array array() const { return {data, is_narrow(dtype)}; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A new tensor, which the operator owns until it gives it to the caller. `pinned`: in memory that a GPU reads directly.
class Result {
 public:
  Result(std::initializer_list<int64_t> sizes, int32_t dtype, bool pinned = false) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes.begin()[i];
    auto make = pinned ? aoti_torch_empty_strided_pinned : aoti_torch_empty_strided;
    if (make(sizes.size(), sizes.begin(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &handle_))
      throw std::bad_alloc();
  }
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;
  ~Result() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  Tensor tensor() const { return Tensor(handle_); }
  Array array() const { return tensor().array(); }
  void give(AtenTensorHandle* caller) { *caller = std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// Large blocks of memory that are not in use, by powers of two. They are never freed: the system would take freed blocks
// back, and give new ones page by page, with a fault of a microsecond or two for each page. A prompt's operators spent up to
// two thirds of their time on these faults. Each thread keeps one block of each size to itself, which is in its core's
// caches.
class Spare {
 public:
  static constexpr size_t MIN_BYTES = size_t(1) << 15;

  static void* take(size_t bytes) {
    int power = power_of(bytes);
    if (void* mine = std::exchange(own().pieces[power], nullptr)) return mine;
    {
      std::lock_guard<std::mutex> lock(all().mutex_);
      if (Piece* first = all().first_[power]) return std::exchange(all().first_[power], first->next);
    }
    return std::aligned_alloc(64, size_t(1) << power);
  }
  static void give(void* memory, size_t bytes) {
    int power = power_of(bytes);
    if (void*& mine = own().pieces[power]; mine == nullptr)
      mine = memory;
    else
      all().put(memory, power);
  }

 private:
  struct Piece {
    Piece* next;
  };
  struct Own {
    void* pieces[64] = {};
    ~Own() {
      for (int power = 0; power < 64; ++power)
        if (pieces[power]) all().put(std::exchange(pieces[power], nullptr), power);
    }
  };

  static int power_of(size_t bytes) { return int(std::bit_width(bytes - 1)); }
  // Never destroyed: threads may outlive static objects.
  static Spare& all() {
    static Spare* made = new Spare;
    return *made;
  }
  static Own& own() {
    static thread_local Own mine;
    return mine;
  }
  void put(void* memory, int power) {
    std::lock_guard<std::mutex> lock(mutex_);
    first_[power] = new (memory) Piece{first_[power]};
  }

  std::mutex mutex_;
  Piece* first_[64] = {};
};

// Memory that one operator uses while it runs, aligned for vectors.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count = 0) { reserve(count); }
  void reserve(int64_t count) {
    data_.reset();
    if (count == 0) return;
    size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    void* made = bytes < Spare::MIN_BYTES ? std::aligned_alloc(64, bytes) : Spare::take(bytes);
    if (made == nullptr) throw std::bad_alloc();
    data_ = {static_cast<T*>(made), Return{bytes}};
  }
  operator T*() const { return data_.get(); }

 private:
  struct Return {
    size_t bytes = 0;
    void operator()(T* p) const {
      if (bytes < Spare::MIN_BYTES)
        std::free(p);
      else
        Spare::give(p, bytes);
    }
  };
  std::unique_ptr<T, Return> data_;
};

// Releases Python's lock while an object lives, if the thread holds the lock: AOTInductor's containers run while it is held.
// So another Python thread can queue a GPU's work while an operator computes. Does nothing in a process without Python.
class PythonGoesOn {
 public:
  PythonGoesOn() {
    static const auto is_held = found<int()>("PyGILState_Check");
    static const auto release = found<void*()>("PyEval_SaveThread");
    if (is_held && release && is_held()) thread_ = release();
  }
  PythonGoesOn(const PythonGoesOn&) = delete;
  PythonGoesOn& operator=(const PythonGoesOn&) = delete;
  ~PythonGoesOn() {
    static const auto take = found<void(void*)>("PyEval_RestoreThread");
    if (thread_) take(thread_);
  }

 private:
  template <typename Function>
  static Function* found(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }

  void* thread_ = nullptr;
};

// Runs an operator's body. Exceptions do not cross the C interface: they are printed here, because torch only says that a
// call failed.
template <typename Body>
AOTITorchError guarded(const char* name, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ostinato: %s failed: %s\n", name, error.what());
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

}  // namespace ostinato
