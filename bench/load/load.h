/* The bench's load generator: clients, front end and app in one small C program, so that it costs much less
 * than what it measures.
 *
 *   conn.c    connections: epoll, TLS, buffers
 *   h2.c      as much of HTTP/2 as tunnels need (RFC 9113), either end
 *   app.c     what serves the bytes of a tunnel at its far end
 *   delay.c   a path with a latency between two processes
 *   client.c  what opens tunnels, loads them and measures
 *   main.c    the command line
 *
 * A tunnel is a `struct stream`, whether it is a TCP connection of its own or a stream of an HTTP/2 one. What
 * is said in it is the bench's own protocol: a ClientHello first (skipped by the app) when the way leads
 * through a gateway that wants one; then commands of the client:
 *
 *   'E'                        from now on everything is echoed
 *   'X' up (u64) down (u64)    takes `up` bytes, sends `down` bytes, and one more when both are done
 */
#ifndef LOAD_H
#define LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <openssl/ssl.h>

enum {
    READ_BYTES = 256 << 10,
    FRAME_BYTES = 16384,           /* DATA as large as every peer takes it without being asked */
    CONGESTED_BYTES = 256 << 10,   /* unsent bytes beyond which no more bulk is produced */
    COMMAND_BYTES = 17,
    BUCKETS = 256,
};

struct buffer {
    uint8_t *data;
    size_t start, end, size;
};

struct stream;

struct conn {
    int fd;
    SSL *ssl;
    bool server, h2, connecting, handshaking, dirty, dead, want_write, reading_ended;
    struct buffer in, out;
    struct conn *next_dirty;
    struct stream *only;           /* of a connection without HTTP/2 */
    /* HTTP/2 */
    bool preface_seen, goaway, settings_seen;
    int64_t send_window;
    uint32_t initial_window, max_streams, next_id, receive_due;
    int open_streams;
    struct stream *buckets[BUCKETS];
    struct stream *bulk;           /* streams that have more to send than windows let through */
};

struct stream {
    struct conn *conn;
    uint32_t id;
    int64_t send_window;
    uint32_t receive_due;
    bool sent_end, got_end, answered;
    uint64_t to_send;              /* bulk that is still to be sent */
    bool end_wanted;               /* and then the end */
    struct stream *next, *next_bulk;
    bool in_bulk;
    /* the app's */
    enum { APP_START, APP_HELLO, APP_COMMAND, APP_ECHO, APP_EXCHANGE } app_state;
    uint8_t command[COMMAND_BYTES];
    size_t command_bytes;
    uint64_t to_take;
    bool last_sent;                /* the byte that says that both are done */
    /* the client's */
    struct tunnel *tunnel;
};

/* conn.c */
extern int poller;
extern uint32_t stream_window, connection_window; /* what a peer may send ahead */
extern bool verbose;
uint64_t now_ns(void);
void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
int listen_on(const char *address, char *bound, size_t size);
struct conn *accept_conn(int listener, SSL_CTX *tls, bool h2);
int connect_to(const char *address);
struct conn *open_conn(const char *address, bool h2);
void conn_write(struct conn *, const void *, size_t);
void conn_wants_flush(struct conn *);
void conn_close(struct conn *, bool reset);
void flush_dirty(void);
void conn_event(struct conn *, uint32_t events);
SSL_CTX *server_tls(const char *certificate, const char *key);
void buffer_add(struct buffer *, const void *, size_t);

/* streams, of either kind: h2.c */
struct stream *stream_new(struct conn *, uint32_t id);
void stream_write(struct stream *, const void *, size_t);   /* small things: no back pressure */
void stream_send_bulk(struct stream *, uint64_t bytes);
void stream_end(struct stream *);
void stream_drop(struct stream *, bool reset);
struct stream *h2_open(struct conn *, const char *path);
void h2_start(struct conn *);
void h2_data(struct conn *);
void pump(struct conn *);

/* delay.c */
void delay(int listener, const char *to, double one_way_ms) __attribute__((noreturn));

/* app.c and client.c: what the streams tell */
void app_data(struct stream *, const uint8_t *, size_t);
void app_drained(struct stream *);
void app_end(struct stream *);
void client_connected(struct conn *);
void client_answer(struct stream *, bool ok);
void client_data(struct stream *, const uint8_t *, size_t);
void client_end(struct stream *);
void client_lost(struct stream *);

void serve(int listener, SSL_CTX *tls, bool h2);
int client_main(int argc, char **argv);

#endif
