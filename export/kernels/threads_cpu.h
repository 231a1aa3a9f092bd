// The threads that all kernels of a process share.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ostinato {

// The number of threads that work together, the caller's included: OMP_NUM_THREADS if it is set, else one for each physical
// core that the process may use.
int thread_count();

using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run_tasks(int64_t count, int64_t pieces, Task task, const void* context);

// Calls work(0) to work(count - 1), in any order and on any thread, and returns when all are done. The calls are cut into
// pieces of neighbours, `each` pieces per thread. A thread takes one piece at a time. So a thread that the system has
// suspended delays only its own piece, and nothing if it has not begun one. Taking a piece costs all threads a tenth of a
// microsecond. A caller inside such a call works alone, and so does a caller while another thread of the process is in such a
// call.
template <typename Work>
void parallel(int64_t count, const Work& work, int64_t each = 8) {
  auto task = [](const void* context, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) (*static_cast<const Work*>(context))(index);
  };
  run_tasks(count, each * thread_count(), task, &work);
}

}  // namespace ostinato
