/* A clock of its own for the processes that preload this: the time of day is moved by the seconds that the
 * file TORTURE_CLOCK holds, a 64-bit number that may change at any moment. Monotonic clocks stay. A wait until
 * a time of day ends when that comes by the moved clock.
 *
 *     cc -shared -fPIC -O2 -o clock.so clock.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *moved;
static const time_t SINCE_BOOT = 1000000000; /* a smaller absolute time is a monotonic clock's */

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("TORTURE_CLOCK");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *page = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, descriptor, 0);
    if (page != MAP_FAILED)
        moved = page;
    close(descriptor);
}

static int64_t by(void) { return moved ? *moved : 0; }

int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += by();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed && now)
        now->tv_sec += by();
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

static struct timespec real(const struct timespec *until) {
    struct timespec found = *until;
    if (found.tv_sec > SINCE_BOOT)
        found.tv_sec -= by();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next)
        next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next)
        next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec then = real(until);
    return next(cond, mutex, &then);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec then = real(until);
    return next(semaphore, &then);
}
