/* Connections: non-blocking sockets on one epoll, TLS at a server's end, buffers, and one write a turn. */
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

int poller = -1;
bool verbose;
static struct conn *dirty_list;
static uint8_t read_buffer[READ_BYTES];

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void die(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

void buffer_add(struct buffer *buffer, const void *data, size_t size)
{
    if (buffer->start == buffer->end)
        buffer->start = buffer->end = 0;
    if (buffer->end + size > buffer->size && buffer->start) {
        memmove(buffer->data, buffer->data + buffer->start, buffer->end - buffer->start);
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->end + size > buffer->size) {
        buffer->size = (buffer->end + size) * 2;
        buffer->data = realloc(buffer->data, buffer->size);
        if (!buffer->data)
            die("out of memory");
    }
    memcpy(buffer->data + buffer->end, data, size);
    buffer->end += size;
}

static struct sockaddr_in parse(const char *address)
{
    char host[64];
    const char *colon = strrchr(address, ':');
    struct sockaddr_in name = {.sin_family = AF_INET};
    if (!colon || (size_t)(colon - address) >= sizeof host)
        die("no HOST:PORT: %s", address);
    memcpy(host, address, (size_t)(colon - address));
    host[colon - address] = 0;
    name.sin_port = htons((uint16_t)atoi(colon + 1));
    if (inet_pton(AF_INET, host, &name.sin_addr) != 1)
        die("no IPv4 address: %s", address);
    return name;
}

int listen_on(const char *address, char *bound, size_t size)
{
    struct sockaddr_in name = parse(address);
    socklen_t length = sizeof name;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, (struct sockaddr *)&name, sizeof name) || listen(fd, 4096))
        die("listen on %s: %s", address, strerror(errno));
    getsockname(fd, (struct sockaddr *)&name, &length);
    char host[64];
    inet_ntop(AF_INET, &name.sin_addr, host, sizeof host);
    snprintf(bound, size, "%s:%d", host, ntohs(name.sin_port));
    return fd;
}

static int choose_h2(SSL *ssl, const unsigned char **out, unsigned char *size, const unsigned char *in,
                     unsigned int in_size, void *unused)
{
    static const unsigned char h2[] = "\x02h2";
    (void)ssl, (void)unused;
    if (SSL_select_next_proto((unsigned char **)out, size, h2, 3, in, in_size) != OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_ALERT_FATAL;
    return SSL_TLSEXT_ERR_OK;
}

SSL_CTX *server_tls(const char *certificate, const char *key)
{
    SSL_CTX *tls = SSL_CTX_new(TLS_server_method());
    if (SSL_CTX_use_certificate_chain_file(tls, certificate) != 1 ||
        SSL_CTX_use_PrivateKey_file(tls, key, SSL_FILETYPE_PEM) != 1)
        die("certificate %s or key %s cannot be used", certificate, key);
    SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION);
    SSL_CTX_set_alpn_select_cb(tls, choose_h2, NULL);
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                              SSL_MODE_RELEASE_BUFFERS);
    return tls;
}

static struct conn *conn_new(int fd, bool server, bool h2)
{
    struct conn *conn = calloc(1, sizeof *conn);
    int one = 1;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conn->fd = fd;
    conn->server = server;
    conn->h2 = h2;
    conn->send_window = 65535;
    conn->initial_window = 65535;
    conn->max_streams = 100;
    conn->next_id = 1;
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event))
        die("epoll: %s", strerror(errno));
    return conn;
}

static void watch(struct conn *conn, bool writing)
{
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = conn};
    if (conn->reading_ended)
        event.events &= ~(uint32_t)EPOLLIN;
    conn->want_write = writing;
    epoll_ctl(poller, EPOLL_CTL_MOD, conn->fd, &event);
}

struct conn *accept_conn(int listener, SSL_CTX *tls, bool h2)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR)
            return NULL;
        die("accept: %s", strerror(errno));
    }
    struct conn *conn = conn_new(fd, true, h2);
    if (tls) {
        conn->ssl = SSL_new(tls);
        SSL_set_fd(conn->ssl, fd);
        SSL_set_accept_state(conn->ssl);
        conn->handshaking = true;
    } else if (h2) {
        h2_start(conn);
    } else {
        conn->only = stream_new(conn, 0);
    }
    return conn;
}

int connect_to(const char *address)
{
    struct sockaddr_in name = parse(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        die("socket: %s", strerror(errno));
    if (connect(fd, (struct sockaddr *)&name, sizeof name) && errno != EINPROGRESS)
        die("connect to %s: %s", address, strerror(errno));
    return fd;
}

struct conn *open_conn(const char *address, bool h2)
{
    struct conn *conn = conn_new(connect_to(address), false, h2);
    conn->connecting = true;
    watch(conn, true);
    return conn;
}

void conn_wants_flush(struct conn *conn)
{
    if (!conn->dirty) {
        conn->dirty = true;
        conn->next_dirty = dirty_list;
        dirty_list = conn;
    }
}

void conn_write(struct conn *conn, const void *data, size_t size)
{
    if (conn->dead)
        return;
    buffer_add(&conn->out, data, size);
    conn_wants_flush(conn);
}

void conn_close(struct conn *conn, bool reset)
{
    if (conn->dead)
        return;
    conn->dead = true;
    if (reset) {
        struct linger linger = {1, 0};
        setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    }
    if (conn->ssl)
        SSL_free(conn->ssl);
    close(conn->fd);
    conn->fd = -1;
    conn_wants_flush(conn); /* which frees it, once nobody on the stack has it in hand */
}

static void lost(struct conn *conn)
{
    if (conn->only && conn->only->tunnel)
        client_lost(conn->only);
    if (conn->h2)
        for (int i = 0; i < BUCKETS; i++)
            for (struct stream *stream = conn->buckets[i], *next; stream; stream = next) {
                next = stream->next;
                if (stream->tunnel)
                    client_lost(stream);
            }
    conn_close(conn, false);
}

static ssize_t send_some(struct conn *conn)
{
    struct buffer *out = &conn->out;
    size_t size = out->end - out->start;
    if (!conn->ssl)
        return send(conn->fd, out->data + out->start, size, MSG_NOSIGNAL);
    int sent = SSL_write(conn->ssl, out->data + out->start, size > FRAME_BYTES ? FRAME_BYTES : (int)size);
    if (sent > 0)
        return sent;
    int error = SSL_get_error(conn->ssl, sent);
    ERR_clear_error();
    errno = error == SSL_ERROR_WANT_WRITE || error == SSL_ERROR_WANT_READ ? EAGAIN : EPIPE;
    return -1;
}

static void flush(struct conn *conn)
{
    struct buffer *out = &conn->out;
    bool blocked = false;
    for (;;) {
        while (out->end > out->start && !blocked) {
            ssize_t sent = send_some(conn);
            if (sent > 0) {
                out->start += (size_t)sent;
            } else if (errno == EAGAIN) {
                blocked = true;
            } else {
                lost(conn);
                return;
            }
        }
        if (blocked || out->end > out->start)
            break;
        pump(conn); /* there is room for more bulk */
        if (out->end == out->start)
            break;
    }
    if (blocked != conn->want_write)
        watch(conn, blocked);
    struct stream *only = conn->only;
    if (only && !blocked && only->end_wanted && !only->sent_end && !only->to_send) {
        only->sent_end = true;
        shutdown(conn->fd, SHUT_WR);
        if (only->got_end)
            stream_drop(only, false);
    }
}

void flush_dirty(void)
{
    while (dirty_list) {
        struct conn *conn = dirty_list;
        dirty_list = conn->next_dirty;
        conn->dirty = false;
        if (!conn->dead && !conn->connecting && !conn->handshaking)
            flush(conn);
        if (conn->dead && !conn->dirty) {
            for (int i = 0; i < BUCKETS; i++)
                for (struct stream *stream = conn->buckets[i], *next; stream; stream = next) {
                    next = stream->next;
                    free(stream);
                }
            free(conn->only);
            free(conn->in.data);
            free(conn->out.data);
            free(conn);
        }
    }
}

static void received(struct conn *conn, const uint8_t *data, size_t size)
{
    if (conn->h2) {
        buffer_add(&conn->in, data, size);
        h2_data(conn);
    } else if (conn->server) {
        app_data(conn->only, data, size);
    } else {
        client_data(conn->only, data, size);
    }
}

static void read_some(struct conn *conn)
{
    for (;;) {
        ssize_t size;
        if (conn->ssl) {
            size = SSL_read(conn->ssl, read_buffer, sizeof read_buffer);
            if (size <= 0) {
                int error = SSL_get_error(conn->ssl, (int)size);
                ERR_clear_error();
                if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE)
                    return;
                size = 0;
            }
        } else {
            size = recv(conn->fd, read_buffer, sizeof read_buffer, 0);
            if (size < 0 && (errno == EAGAIN || errno == EINTR))
                return;
        }
        if (size < 0 || (size == 0 && conn->h2)) {
            lost(conn);
            return;
        }
        if (size == 0) {
            conn->reading_ended = true;
            watch(conn, conn->want_write);
            conn->only->got_end = true;
            if (conn->server)
                app_end(conn->only);
            else
                client_end(conn->only);
            return;
        }
        received(conn, read_buffer, (size_t)size);
        if (conn->dead || (!conn->ssl && size < (ssize_t)sizeof read_buffer))
            return;
    }
}

void conn_event(struct conn *conn, uint32_t events)
{
    if (conn->dead)
        return;
    if (conn->connecting) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error)
            die("connect: %s", strerror(error));
        conn->connecting = false;
        watch(conn, false);
        if (conn->h2)
            h2_start(conn);
        client_connected(conn);
        conn_wants_flush(conn);
        return;
    }
    if (conn->handshaking) {
        int done = SSL_do_handshake(conn->ssl);
        if (done != 1) {
            int error = SSL_get_error(conn->ssl, done);
            ERR_clear_error();
            if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE)
                conn_close(conn, false);
            return;
        }
        conn->handshaking = false;
        h2_start(conn);
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_some(conn);
    if (!conn->dead && events & EPOLLOUT)
        conn_wants_flush(conn);
}
