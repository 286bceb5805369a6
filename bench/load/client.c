/* Opens tunnels, loads them and measures. One scenario a run:
 *
 *   open   --count N            opens and closes N tunnels, --tunnels at a time
 *   rr     --size S --seconds T round trips of S bytes on every tunnel, as fast as they come back, or --rate
 *                               a second in all, each measured from when it was due (no coordinated omission)
 *   bulk   --up B --down B      every tunnel takes and gives so many bytes, at once
 *   hold                        does nothing
 *
 * --hello FILE may be given several times: tunnels take them in turn.
 *
 * When all tunnels stand (`open`: when it has warmed up) it prints a line, waits for one on its standard input,
 * runs, prints the result as JSON, and ends at the end of its input.
 */
#include "load.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SAMPLES = 8 << 20, MAX_HELLO = 16384, MAX_SIZE = 65536, MAX_HELLOS = 64, EVENTS = 256, STREAMS_EACH = 100 };

struct tunnel {
    struct stream *stream;
    enum { OPENING, GREETING, IDLE, ROUND_TRIP, EXCHANGE, CLOSING } state;
    uint64_t started;  /* ns */
    uint64_t due;      /* ns, of the next round trip at a given rate */
    uint64_t expected; /* bytes that are to come */
};

static const char *to, *path = "/_hbone/15003";
static bool h2;
static struct { uint8_t data[MAX_HELLO]; size_t size; } hellos[MAX_HELLOS];
static int hello_count;
static int tunnels = 1, connections, warm_up = 50, exit_code;
static uint64_t count = 1000, size = 64, up, down, rate;
static double seconds = 2;
static enum { OPEN, RR, BULK, HOLD } scenario;

static struct tunnel *all;
static struct conn **conns;
static uint32_t *samples;
static size_t sample_count;
static int standing;
static uint64_t begun, finished, round_trips, opened, failed;
static bool measuring, over;
static uint8_t payload[MAX_SIZE];
static int timer = -1;

static void put_u64(uint8_t *at, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        at[i] = (uint8_t)(value >> (56 - 8 * i));
}

static void sample(uint64_t ns)
{
    if (measuring && sample_count < MAX_SAMPLES)
        samples[sample_count++] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

/* The tunnel's first bytes. Then it stands when its first byte has come back. */
static void greet(struct tunnel *tunnel)
{
    tunnel->state = GREETING;
    if (hello_count) {
        int which = (int)((tunnel - all) % hello_count);
        stream_write(tunnel->stream, hellos[which].data, hellos[which].size);
    }
    if (scenario == BULK) {
        uint8_t command[COMMAND_BYTES] = {'X'};
        stream_write(tunnel->stream, command, sizeof command);
    } else {
        stream_write(tunnel->stream, "E1", 2);
    }
    tunnel->expected = 1;
}

static void open_tunnel(struct tunnel *tunnel)
{
    tunnel->state = OPENING;
    tunnel->started = now_ns();
    if (!h2) {
        struct conn *conn = open_conn(to, false);
        tunnel->stream = conn->only = stream_new(conn, 0);
        tunnel->stream->tunnel = tunnel;
        return;
    }
    struct conn *best = conns[0];
    for (int i = 1; i < connections; i++)
        if (conns[i]->open_streams < best->open_streams)
            best = conns[i];
    tunnel->stream = h2_open(best, path);
    tunnel->stream->tunnel = tunnel;
}

static void ask(struct tunnel *tunnel, uint64_t started)
{
    tunnel->state = ROUND_TRIP;
    tunnel->started = started;
    tunnel->expected = size;
    stream_write(tunnel->stream, payload, size);
}

static void close_tunnel(struct tunnel *tunnel)
{
    tunnel->state = CLOSING;
    stream_end(tunnel->stream);
}

static void finish(void)
{
    if (!finished)
        finished = now_ns();
    over = true;
}

void client_connected(struct conn *conn)
{
    if (!conn->h2)
        greet(conn->only->tunnel);
    else
        standing++;
}

void client_answer(struct stream *stream, bool ok)
{
    if (!ok)
        die("a tunnel was refused");
    greet(stream->tunnel);
}

static void stands(struct tunnel *tunnel)
{
    tunnel->state = IDLE;
    standing++;
    if (scenario == OPEN) {
        sample(now_ns() - tunnel->started);
        close_tunnel(tunnel);
    }
}

void client_data(struct stream *stream, const uint8_t *data, size_t bytes)
{
    struct tunnel *tunnel = stream->tunnel;
    (void)data;
    if (tunnel->expected < bytes)
        die("more came back than was sent");
    tunnel->expected -= bytes;
    if (tunnel->expected)
        return;
    uint64_t now = now_ns();
    switch (tunnel->state) {
    case GREETING:
        stands(tunnel);
        break;
    case ROUND_TRIP:
        round_trips++;
        sample(now - tunnel->started);
        tunnel->state = IDLE;
        if (now - begun >= (uint64_t)(seconds * 1e9))
            over = true;
        else if (!rate)
            ask(tunnel, now);
        else if (tunnel->due <= now) {
            ask(tunnel, tunnel->due);
            tunnel->due += (uint64_t)tunnels * 1000000000u / rate;
        }
        break;
    case EXCHANGE:
        tunnel->state = IDLE;
        if (++round_trips == (uint64_t)tunnels)
            finish();
        break;
    default:
        die("data in state %d", tunnel->state);
    }
}

static void gone(struct tunnel *tunnel)
{
    tunnel->stream = NULL;
    standing--;
    opened++;
}

void client_end(struct stream *stream)
{
    struct tunnel *tunnel = stream->tunnel;
    if (tunnel->state != CLOSING) {
        fprintf(stderr, "load: a tunnel ended by itself in state %d\n", tunnel->state);
        failed++;
        exit_code = 1;
    }
    stream->tunnel = NULL;
    if (h2) {
        if (!stream->sent_end)
            stream_end(stream);
        else
            stream_drop(stream, false);
    } else {
        stream_drop(stream, false);
    }
    gone(tunnel);
}

void client_lost(struct stream *stream)
{
    struct tunnel *tunnel = stream->tunnel;
    stream->tunnel = NULL;
    if (tunnel->state != CLOSING) {
        fprintf(stderr, "load: a tunnel was reset in state %d\n", tunnel->state);
        failed++;
        exit_code = 1;
        finish();
    }
    if (h2)
        stream_drop(stream, false);
    gone(tunnel);
}

static void turn(int timeout_ms)
{
    struct epoll_event events[EVENTS];
    flush_dirty();
    int ready = epoll_wait(poller, events, EVENTS, timeout_ms);
    if (ready < 0 && errno != EINTR)
        die("epoll: %s", strerror(errno));
    for (int i = 0; i < ready; i++) {
        if (events[i].data.ptr)
            conn_event(events[i].data.ptr, events[i].events);
        else {
            uint64_t expirations;
            if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
                die("timer: %s", strerror(errno));
        }
    }
    flush_dirty();
}

static void ensure(bool good, uint64_t deadline, const char *what)
{
    if (!good && now_ns() > deadline)
        die("%s within a minute", what);
}

/* Opens and closes `how_many` tunnels, `tunnels` at a time. */
static void churn(uint64_t how_many)
{
    uint64_t begun_tunnels = 0, deadline = now_ns() + 300 * 1000000000ull;
    opened = 0;
    while (opened < how_many) {
        for (int i = 0; i < tunnels && begun_tunnels < how_many; i++)
            if (!all[i].stream) {
                open_tunnel(&all[i]);
                begun_tunnels++;
            }
        turn(1000);
        ensure(false, deadline, "not all tunnels were opened");
    }
}

static void set_up(void)
{
    uint64_t deadline = now_ns() + 60 * 1000000000ull;
    all = calloc((size_t)tunnels, sizeof *all);
    samples = malloc(MAX_SAMPLES * sizeof *samples);
    if (h2) {
        if (!connections)
            connections = (tunnels + STREAMS_EACH - 1) / STREAMS_EACH;
        conns = calloc((size_t)connections, sizeof *conns);
        for (int i = 0; i < connections; i++)
            conns[i] = open_conn(to, true);
        for (int i = 0; i < connections; i++)
            while (!conns[i]->settings_seen) {
                turn(1000);
                ensure(false, deadline, "no SETTINGS came");
            }
        standing = 0;
    }
    if (scenario == OPEN) {
        churn((uint64_t)(warm_up * tunnels));
        return;
    }
    for (int i = 0; i < tunnels; i++) {
        open_tunnel(&all[i]);
        while (i - standing > 64) {
            turn(1000);
            ensure(false, deadline, "not all tunnels were opened");
        }
    }
    while (standing < tunnels) {
        turn(1000);
        ensure(false, deadline, "not all tunnels were opened");
    }
}

static void round_trips_for(double how_long)
{
    seconds = how_long;
    begun = now_ns();
    over = false;
    round_trips = 0;
    if (!rate) {
        for (int i = 0; i < tunnels; i++)
            ask(&all[i], now_ns());
        uint64_t end = begun + (uint64_t)(how_long * 1e9);
        while (now_ns() < end && !failed)
            turn(1000);
        over = true;
    } else {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
        uint64_t end = begun + (uint64_t)(how_long * 1e9);
        if (timer < 0) {
            timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
            epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event);
        }
        for (int i = 0; i < tunnels; i++)
            all[i].due = begun + (uint64_t)i * 1000000000u / rate;
        for (uint64_t n = 0;; n++) {
            uint64_t due = begun + n * 1000000000u / rate, now;
            if (due >= end || failed)
                break;
            while ((now = now_ns()) < due) {
                struct itimerspec when = {.it_value = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)}};
                timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
                turn(1000);
            }
            struct tunnel *tunnel = &all[n % (uint64_t)tunnels];
            if (tunnel->state == IDLE) {
                ask(tunnel, due);
                tunnel->due = due + (uint64_t)tunnels * 1000000000u / rate;
                flush_dirty();
            }
        }
    }
    finished = now_ns();
    uint64_t deadline = now_ns() + 60 * 1000000000ull;
    for (int i = 0; i < tunnels && !failed; i++)
        while (all[i].state != IDLE) {
            turn(1000);
            ensure(false, deadline, "not all came back");
        }
}

static void exchange(uint64_t up_bytes, uint64_t down_bytes)
{
    uint8_t command[COMMAND_BYTES] = {'X'};
    put_u64(command + 1, up_bytes);
    put_u64(command + 9, down_bytes);
    over = false;
    round_trips = 0;
    finished = 0;
    begun = now_ns();
    for (int i = 0; i < tunnels; i++) {
        all[i].state = EXCHANGE;
        all[i].expected = down_bytes + 1;
        stream_write(all[i].stream, command, sizeof command);
        if (up_bytes)
            stream_send_bulk(all[i].stream, up_bytes);
    }
    while (!over)
        turn(1000);
}

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static double percentile(double part)
{
    if (!sample_count)
        return 0;
    size_t at = (size_t)(part * (double)sample_count);
    return samples[at < sample_count ? at : sample_count - 1] / 1e3;
}

static void wait_for_line(void)
{
    char line[64];
    if (!fgets(line, sizeof line, stdin))
        exit(exit_code);
}

static void run(void)
{
    struct timespec cpu_before, cpu_after;
    uint64_t operations = 0;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_before);
    measuring = true;
    begun = now_ns();
    switch (scenario) {
    case OPEN:
        churn(count);
        finished = now_ns();
        operations = count;
        break;
    case RR:
        round_trips_for(seconds);
        operations = round_trips;
        break;
    case BULK:
        exchange(up, down);
        operations = (up + down) * (uint64_t)tunnels;
        break;
    case HOLD:
        finished = begun + 1;
        break;
    }
    measuring = false;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_after);
    qsort(samples, sample_count, sizeof *samples, compare);
    printf("{\"operations\": %llu, \"failed\": %llu, \"seconds\": %.6f, \"load_cpu_seconds\": %.6f, "
           "\"p50_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, \"max_us\": %.1f}\n",
           (unsigned long long)operations, (unsigned long long)failed, (double)(finished - begun) / 1e9,
           (double)(cpu_after.tv_sec - cpu_before.tv_sec) + (double)(cpu_after.tv_nsec - cpu_before.tv_nsec) / 1e9,
           percentile(.5), percentile(.99), percentile(.999), percentile(1));
    fflush(stdout);
}

static void read_hello(const char *file)
{
    FILE *source = fopen(file, "rb");
    if (!source)
        die("%s: %s", file, strerror(errno));
    if (hello_count == MAX_HELLOS)
        die("more than %d hellos", MAX_HELLOS);
    hellos[hello_count].size = fread(hellos[hello_count].data, 1, MAX_HELLO, source);
    hello_count++;
    fclose(source);
}

int client_main(int argc, char **argv)
{
    enum { TO = 1, H2, PATH, HELLO, TUNNELS, CONNECTIONS, COUNT, SIZE, SECONDS, UP, DOWN, RATE, WARM_UP };
    static const struct option options[] = {
        {"to", 1, 0, TO},           {"h2", 0, 0, H2},           {"path", 1, 0, PATH},   {"hello", 1, 0, HELLO},
        {"tunnels", 1, 0, TUNNELS}, {"count", 1, 0, COUNT},     {"size", 1, 0, SIZE},   {"up", 1, 0, UP},
        {"seconds", 1, 0, SECONDS}, {"down", 1, 0, DOWN},       {"rate", 1, 0, RATE},   {"warm-up", 1, 0, WARM_UP},
        {"connections", 1, 0, CONNECTIONS}, {0, 0, 0, 0}};
    static const char *names[] = {"open", "rr", "bulk", "hold"};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (option) {
        case TO: to = optarg; break;
        case H2: h2 = true; break;
        case PATH: path = optarg; break;
        case HELLO: read_hello(optarg); break;
        case TUNNELS: tunnels = atoi(optarg); break;
        case CONNECTIONS: connections = atoi(optarg); break;
        case COUNT: count = strtoull(optarg, NULL, 10); break;
        case SIZE: size = strtoull(optarg, NULL, 10); break;
        case SECONDS: seconds = atof(optarg); break;
        case UP: up = strtoull(optarg, NULL, 10); break;
        case DOWN: down = strtoull(optarg, NULL, 10); break;
        case RATE: rate = strtoull(optarg, NULL, 10); break;
        case WARM_UP: warm_up = atoi(optarg); break;
        default: return 2;
        }
    if (optind != argc - 1 || !to || tunnels < 1 || size < 1 || size > MAX_SIZE)
        die("needs --to and one scenario");
    for (int i = 0;; i++) {
        if (i == 4)
            die("no scenario: %s", argv[optind]);
        if (!strcmp(argv[optind], names[i])) {
            scenario = i;
            break;
        }
    }
    set_up();
    double measured_seconds = seconds;
    if (scenario == RR)
        round_trips_for(0.3); /* warm-up */
    if (scenario == BULK)
        exchange(up / 16, down / 16);
    seconds = measured_seconds;
    puts("{\"ready\": true}");
    fflush(stdout);
    wait_for_line();
    run();
    wait_for_line();
    return exit_code;
}
