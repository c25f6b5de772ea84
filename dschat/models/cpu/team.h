// Runs kernels on several threads: in an OpenMP region of their own, or on a team whose threads stay awake from kernel
// to kernel. Waking a sleeping thread takes longer than most kernels of a decoding step.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

// The threads of one OpenMP region: thread 0 runs kernels, the others work().
class Team {
  public:
    int threads() const { return threads_; }
    void assemble(int threads) { threads_ = threads; }

    // Runs job(thread) on every thread, and returns when all are done.
    template <typename Job>
    void run(const Job& job) {
        call_ = [](const void* untyped, int thread) { (*static_cast<const Job*>(untyped))(thread); };
        job_ = &job;
        working_.store(threads_ - 1, std::memory_order_relaxed);
        jobs_.fetch_add(1, std::memory_order_release);
        job(0);
        wait([this] { return working_.load(std::memory_order_acquire) == 0; });
    }

    // What threads other than 0 do until stop().
    void work(int thread) {
        for (uint64_t done = 0;; ++done) {
            wait([this, done] { return jobs_.load(std::memory_order_acquire) != done; });
            if (stopped_) return;
            call_(job_, thread);
            working_.fetch_sub(1, std::memory_order_release);
        }
    }

    void stop() {
        stopped_ = true;
        jobs_.fetch_add(1, std::memory_order_release);
    }

  private:
    // Other processes get the core after some 50 microseconds.
    template <typename Condition>
    static void wait(const Condition& fulfilled) {
        for (int spins = 0; !fulfilled();) {
            if (++spins < 2000) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else {
                spins = 2000;
                sched_yield();
            }
        }
    }

    int threads_ = 1;
    std::atomic<uint64_t> jobs_{0};
    std::atomic<int> working_{0};
    bool stopped_ = false;
    void (*call_)(const void*, int) = nullptr;
    const void* job_ = nullptr;
};

inline thread_local Team* current_team = nullptr;  // of this thread, if it is thread 0 of one

// The part of 0 ... count - 1 that belongs to a thread.
struct Share {
    int64_t begin, end;
    Share(int64_t count, int thread, int threads)
        : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};

// body(thread, threads) on this many threads; on all of the team's, if there is one.
template <typename Body>
void in_parallel(int threads, const Body& body) {
    if (threads <= 1) {
        body(0, 1);
    } else if (current_team) {
        const int all = current_team->threads();
        current_team->run([&body, all](int thread) { body(thread, all); });
    } else {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
    }
}

// The same for two bodies, the second of which begins on every thread when the first has ended on all.
template <typename First, typename Second>
void in_parallel(int threads, const First& first, const Second& second) {
    if (threads <= 1 || current_team) {
        in_parallel(threads, first);
        in_parallel(threads, second);
    } else {
#pragma omp parallel num_threads(threads)
        {
            first(omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
            second(omp_get_thread_num(), omp_get_num_threads());
        }
    }
}

// Runs a function whose kernels use a team of this many threads.
inline void with_team(int threads, void (*function)()) {
    Team team;
#pragma omp parallel num_threads(threads)
    {
        if (omp_get_thread_num() > 0) {
            team.work(omp_get_thread_num());
        } else {
            team.assemble(omp_get_num_threads());  // fewer than asked for, if the system has no more
            current_team = &team;
            function();
            current_team = nullptr;
            team.stop();
        }
    }
}
