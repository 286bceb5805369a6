/* A path with a latency: everything that comes is passed on a fixed time later, each way, in order. No loss and
 * no limit of bandwidth, but for QUEUE_BYTES on the way: at 75 ms one way that is more than 1.6 GiB a second.
 *
 * What it does not delay is TCP's own handshake, which a real path would make a round trip longer: the connection
 * to the far side begins when the near one is accepted, and what the client says first is delayed. */
#include "load.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK_BYTES = 256 << 10, QUEUE_BYTES = 128 << 20 };

struct chunk {
    struct chunk *next;
    uint64_t due;
    size_t start, size;            /* size 0: the end */
    uint8_t data[];
};

struct lane {                      /* one way through a link */
    struct end *to;
    struct chunk *first, *last;
    size_t queued;
    bool ended, broken;
};

struct end {
    int fd;
    struct lane *in;               /* what is read from it */
    uint32_t watched;
    bool blocked;                  /* its socket took no more */
};

struct link {
    struct end ends[2];
    struct lane lanes[2];
    struct link *next;
};

static struct link *links;
static uint64_t delay_ns;

static void watch(struct end *end)
{
    uint32_t wanted = 0;
    if (!end->in->ended && end->in->queued < QUEUE_BYTES)
        wanted |= EPOLLIN;
    if (end->blocked)
        wanted |= EPOLLOUT;
    if (wanted == end->watched)
        return;
    /* One that is watched for nothing would still report that its peer has hung up, again and again. */
    int how = !wanted ? EPOLL_CTL_DEL : end->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    struct epoll_event event = {.events = wanted, .data.ptr = end};
    end->watched = wanted;
    epoll_ctl(poller, how, end->fd, &event);
}

static void read_some(struct end *end)
{
    struct lane *lane = end->in;
    while (!lane->ended && lane->queued < QUEUE_BYTES) {
        struct chunk *chunk = malloc(sizeof *chunk + CHUNK_BYTES);
        if (!chunk)
            die("out of memory");
        ssize_t size = read(end->fd, chunk->data, CHUNK_BYTES);
        if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
            free(chunk);
            break;
        }
        if (size < 0)
            lane->broken = true;
        if (size <= 0) {
            lane->ended = true;
            size = 0;
        }
        struct chunk *fitting = realloc(chunk, sizeof *chunk + (size_t)size);
        chunk = fitting ? fitting : chunk;
        chunk->next = NULL;
        chunk->start = 0;
        chunk->size = (size_t)size;
        chunk->due = now_ns() + delay_ns;
        if (lane->last)
            lane->last->next = chunk;
        else
            lane->first = chunk;
        lane->last = chunk;
        lane->queued += (size_t)size;
        if ((size_t)size < CHUNK_BYTES)
            break;
    }
}

/* Writes what is due. False when the way has ended. */
static bool pass_on(struct lane *lane, uint64_t now)
{
    while (lane->first && lane->first->due <= now && !lane->to->blocked) {
        struct chunk *chunk = lane->first;
        if (!chunk->size) {
            if (lane->broken)
                return false;
            shutdown(lane->to->fd, SHUT_WR);
        }
        while (chunk->start < chunk->size) {
            ssize_t sent = write(lane->to->fd, chunk->data + chunk->start, chunk->size - chunk->start);
            if (sent < 0 && errno == EAGAIN) {
                lane->to->blocked = true;
                return true;
            }
            if (sent < 0 && errno != EINTR)
                return false;
            if (sent > 0) {
                chunk->start += (size_t)sent;
                lane->queued -= (size_t)sent;
            }
        }
        lane->first = chunk->next;
        if (!lane->first)
            lane->last = NULL;
        free(chunk);
    }
    return true;
}

static void drop(struct link **at)
{
    struct link *link = *at;
    struct linger now = {1, 0};
    for (int i = 0; i < 2; i++) {
        if (link->lanes[0].broken || link->lanes[1].broken)
            setsockopt(link->ends[i].fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
        close(link->ends[i].fd);
        while (link->lanes[i].first) {
            struct chunk *chunk = link->lanes[i].first;
            link->lanes[i].first = chunk->next;
            free(chunk);
        }
    }
    *at = link->next;
    free(link);
}

static void add_link(int near, const char *to)
{
    struct link *link = calloc(1, sizeof *link);
    int fds[2] = {near, connect_to(to)}, one = 1;
    for (int i = 0; i < 2; i++) {
        struct end *end = &link->ends[i];
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = end};
        *end = (struct end){fds[i], &link->lanes[i], EPOLLIN, false};
        link->lanes[i].to = &link->ends[!i];
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (epoll_ctl(poller, EPOLL_CTL_ADD, fds[i], &event))
            die("epoll: %s", strerror(errno));
    }
    link->next = links;
    links = link;
}

/* Sends what is due on all links, and gives the nanoseconds to the next that will be; -1: nothing is on its way. */
static int64_t pass_all_on(void)
{
    uint64_t now = now_ns(), next = UINT64_MAX;
    for (struct link **at = &links; *at;) {
        struct link *link = *at;
        bool alive = pass_on(&link->lanes[0], now) && pass_on(&link->lanes[1], now);
        bool over = link->lanes[0].ended && link->lanes[1].ended && !link->lanes[0].first && !link->lanes[1].first;
        if (!alive || over) {
            link->lanes[0].broken |= !alive;
            drop(at);
            continue;
        }
        for (int i = 0; i < 2; i++) {
            watch(&link->ends[i]);
            if (link->lanes[i].first && !link->ends[!i].blocked && link->lanes[i].first->due < next)
                next = link->lanes[i].first->due;
        }
        at = &link->next;
    }
    return next == UINT64_MAX ? -1 : next <= now ? 0 : (int64_t)(next - now);
}

void delay(int listener, const char *to, double one_way_ms)
{
    struct epoll_event events[256], event = {.events = EPOLLIN, .data.ptr = NULL};
    delay_ns = (uint64_t)(one_way_ms * 1e6);
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int64_t wait = pass_all_on();
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        int ready = epoll_pwait2(poller, events, 256, wait < 0 ? NULL : &timeout, NULL);
        if (ready < 0 && errno != EINTR)
            die("epoll: %s", strerror(errno));
        for (int i = 0; i < ready; i++) {
            struct end *end = events[i].data.ptr;
            if (!end) {
                int near;
                while ((near = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0)
                    add_link(near, to);
                continue;
            }
            if (events[i].events & (EPOLLOUT | EPOLLERR))
                end->blocked = false;
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                read_some(end);
        }
    }
}
