/* A wall clock that a file shifts, for clock jumps in storms: preloaded by chaos.py into the processes of a job.
 *
 * The file that CHAOS_CLOCK names holds one int64, the shift in seconds. The monotonic clocks are left alone, as they
 * are when an administrator or NTP sets the time. libfaketime 0.9.10 cannot do that: with an unshifted monotonic clock
 * its clock_nanosleep fails (EINVAL), and with it Python's time.sleep.
 *
 * PyTorch is built for C libraries whose condition variables cannot wait by the monotonic clock: it waits until a time of
 * the wall clock, and computes that time anew if it wakes too early. So such a time is shifted back here. Otherwise its
 * waits would all end at once after a jump back, and Gloo would turn on the processor instead of waiting.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) shift_s = memory;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = (int)syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && shift_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift_s;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return (time_t)-1;
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}

/* Times of the monotonic clock, which condition variables may use instead, are far smaller than those of the wall clock. */
#define EARLIEST_WALL_CLOCK_S 1000000000

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec real = *until;
    if (!wait) {
        void *found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86-64 has an older one, too */
        *(void **)&wait = found ? found : dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    if (shift_s && real.tv_sec - *shift_s > EARLIEST_WALL_CLOCK_S) real.tv_sec -= *shift_s;
    return wait(cond, mutex, &real);
}
