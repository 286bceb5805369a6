/* As much of HTTP/2 as tunnels need (RFC 9113). Header blocks of requests are not read at all: whoever asks
 * for a stream gets one. Of a response only a first field of `:status: 200` counts as yes. */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8, HAS_PRIORITY = 32 };
enum { STATUS_200 = 0x88 }; /* indexed field 8 (RFC 7541 appendix A) */

static const char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/* As hgate and krun have them, so that both of a pair see the same. */
uint32_t stream_window = 1 << 20, connection_window = 16 << 20;
static uint8_t pattern[FRAME_BYTES];

static uint32_t u32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void put_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void frame(struct conn *conn, int kind, int flags, uint32_t id, const void *payload, size_t size)
{
    uint8_t header[9] = {(uint8_t)(size >> 16), (uint8_t)(size >> 8), (uint8_t)size, (uint8_t)kind,
                         (uint8_t)flags};
    put_u32(header + 5, id);
    conn_write(conn, header, sizeof header);
    if (size)
        conn_write(conn, payload, size);
}

static void window_update(struct conn *conn, uint32_t id, uint32_t bytes)
{
    uint8_t payload[4];
    put_u32(payload, bytes);
    frame(conn, WINDOW_UPDATE, 0, id, payload, sizeof payload);
}

void h2_start(struct conn *conn)
{
    uint8_t settings[12] = {0, 4, 0, 0, 0, 0, 0, 3, 0, 0, 3, 232}; /* window; 1,000 streams */
    put_u32(settings + 2, stream_window);
    if (!conn->server)
        conn_write(conn, PREFACE, sizeof PREFACE - 1);
    conn->preface_seen = !conn->server;
    frame(conn, SETTINGS, 0, 0, settings, sizeof settings);
    window_update(conn, 0, connection_window - 65535);
}

/* Streams. */

struct stream *stream_new(struct conn *conn, uint32_t id)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        die("out of memory");
    stream->conn = conn;
    stream->id = id;
    stream->send_window = conn->initial_window;
    if (conn->h2) {
        struct stream **bucket = &conn->buckets[id / 2 % BUCKETS];
        stream->next = *bucket;
        *bucket = stream;
        conn->open_streams++;
    }
    return stream;
}

static struct stream *find(struct conn *conn, uint32_t id)
{
    struct stream *stream = conn->buckets[id / 2 % BUCKETS];
    while (stream && stream->id != id)
        stream = stream->next;
    return stream;
}

static void leave_bulk(struct stream *stream)
{
    for (struct stream **at = &stream->conn->bulk; *at; at = &(*at)->next_bulk)
        if (*at == stream) {
            *at = stream->next_bulk;
            break;
        }
    stream->in_bulk = false;
}

void stream_drop(struct stream *stream, bool reset)
{
    struct conn *conn = stream->conn;
    if (stream->in_bulk)
        leave_bulk(stream);
    if (!conn->h2) {
        conn->only = NULL;
        conn_close(conn, reset);
    } else {
        if (reset) {
            uint8_t code[4] = {0, 0, 0, 8};
            frame(conn, RST_STREAM, 0, stream->id, code, sizeof code);
        }
        for (struct stream **at = &conn->buckets[stream->id / 2 % BUCKETS]; *at; at = &(*at)->next)
            if (*at == stream) {
                *at = stream->next;
                break;
            }
        conn->open_streams--;
    }
    free(stream);
}

static void over_if_done(struct stream *stream)
{
    if (stream->conn->h2 && stream->sent_end && stream->got_end && !stream->tunnel)
        stream_drop(stream, false);
}

void stream_write(struct stream *stream, const void *data, size_t size)
{
    struct conn *conn = stream->conn;
    if (!conn->h2) {
        conn_write(conn, data, size);
        return;
    }
    for (const uint8_t *at = data; size;) {
        size_t part = size > FRAME_BYTES ? FRAME_BYTES : size;
        if ((int64_t)part > stream->send_window || (int64_t)part > conn->send_window)
            die("a window is full: what is echoed has to be small");
        frame(conn, DATA, 0, stream->id, at, part);
        stream->send_window -= (int64_t)part;
        conn->send_window -= (int64_t)part;
        at += part;
        size -= part;
    }
}

void stream_send_bulk(struct stream *stream, uint64_t bytes)
{
    stream->to_send += bytes;
    if (!stream->in_bulk) {
        stream->in_bulk = true;
        stream->next_bulk = stream->conn->bulk;
        stream->conn->bulk = stream;
    }
    conn_wants_flush(stream->conn);
}

void stream_end(struct stream *stream)
{
    if (stream->sent_end || stream->end_wanted)
        return;
    stream->end_wanted = true;
    if (!stream->conn->h2) {
        conn_wants_flush(stream->conn);
    } else if (!stream->to_send) {
        frame(stream->conn, DATA, END_STREAM, stream->id, NULL, 0);
        stream->sent_end = true;
        over_if_done(stream);
    }
}

/* Fills the connection's buffer from the streams that have bulk, a frame each in turn. */
void pump(struct conn *conn)
{
    bool moved = true;
    while (moved && conn->out.end - conn->out.start < CONGESTED_BYTES) {
        moved = false;
        for (struct stream *stream = conn->bulk, *next; stream; stream = next) {
            next = stream->next_bulk;
            uint64_t part = stream->to_send > FRAME_BYTES ? FRAME_BYTES : stream->to_send;
            if (conn->h2) {
                if (stream->send_window < (int64_t)part)
                    part = stream->send_window > 0 ? (uint64_t)stream->send_window : 0;
                if (conn->send_window < (int64_t)part)
                    part = conn->send_window > 0 ? (uint64_t)conn->send_window : 0;
            }
            if (part) {
                moved = true;
                stream->to_send -= part;
                if (conn->h2) {
                    frame(conn, DATA, 0, stream->id, pattern, part);
                    stream->send_window -= (int64_t)part;
                    conn->send_window -= (int64_t)part;
                } else {
                    conn_write(conn, pattern, part);
                }
            }
            if (!stream->to_send) {
                leave_bulk(stream);
                if (conn->server)
                    app_drained(stream);
                if (stream->end_wanted && conn->h2) {
                    stream->end_wanted = false;
                    stream_end(stream);
                }
            }
        }
    }
}

/* A POST for `path`; the answer comes as client_answer. */
struct stream *h2_open(struct conn *conn, const char *path)
{
    static const char authority[] = "hello.run.test";
    uint8_t block[512] = {0x83, 0x86}; /* :method POST, :scheme http */
    size_t size = 2, length = strlen(path);
    if (length > 100)
        die("path too long: %s", path);
    block[size++] = 0x04; /* :path, a literal that is not indexed */
    block[size++] = (uint8_t)length;
    memcpy(block + size, path, length);
    size += length;
    block[size++] = 0x01; /* :authority */
    block[size++] = sizeof authority - 1;
    memcpy(block + size, authority, sizeof authority - 1);
    size += sizeof authority - 1;
    struct stream *stream = stream_new(conn, conn->next_id);
    conn->next_id += 2;
    frame(conn, HEADERS, END_HEADERS, stream->id, block, size);
    return stream;
}

/* Frames that come. */

static void consumed(struct conn *conn, struct stream *stream, uint32_t bytes)
{
    conn->receive_due += bytes;
    if (conn->receive_due > connection_window / 2) {
        window_update(conn, 0, conn->receive_due);
        conn->receive_due = 0;
    }
    if (stream) {
        stream->receive_due += bytes;
        if (stream->receive_due > stream_window / 2) {
            window_update(conn, stream->id, stream->receive_due);
            stream->receive_due = 0;
        }
    }
}

static void ended(struct stream *stream)
{
    stream->got_end = true;
    if (stream->tunnel)
        client_end(stream);
    else if (stream->conn->server)
        app_end(stream);
}

static void data_frame(struct conn *conn, int flags, uint32_t id, const uint8_t *payload, size_t size)
{
    struct stream *stream = find(conn, id);
    consumed(conn, flags & END_STREAM ? NULL : stream, (uint32_t)size);
    if (!stream)
        return;
    if (flags & PADDED) {
        size -= (size_t)payload[0] + 1;
        payload++;
    }
    if (size && conn->server)
        app_data(stream, payload, size);
    else if (size && stream->tunnel)
        client_data(stream, payload, size);
    stream = flags & END_STREAM ? find(conn, id) : NULL;
    if (stream)
        ended(stream);
}

static void headers_frame(struct conn *conn, int flags, uint32_t id, const uint8_t *payload)
{
    struct stream *stream = find(conn, id);
    if (!(flags & END_HEADERS))
        die("a header block in several frames");
    if (conn->server) {
        static const uint8_t ok[] = {STATUS_200};
        if (stream)
            return; /* trailers */
        stream = stream_new(conn, id);
        frame(conn, HEADERS, END_HEADERS, id, ok, sizeof ok);
    } else if (stream && stream->tunnel && !stream->answered) {
        int skip = (flags & PADDED ? 1 : 0) + (flags & HAS_PRIORITY ? 5 : 0);
        /* Before it may stand an update of the table's size (RFC 7541 section 6.3). */
        while ((payload[skip] & 0xe0) == 0x20)
            skip++;
        stream->answered = true;
        client_answer(stream, payload[skip] == STATUS_200);
        stream = find(conn, id);
    }
    if (stream && flags & END_STREAM)
        ended(stream);
}

static void settings_frame(struct conn *conn, int flags, const uint8_t *payload, size_t size)
{
    if (flags & ACK)
        return;
    for (size_t at = 0; at + 6 <= size; at += 6) {
        uint32_t value = u32(payload + at + 2);
        int name = payload[at] << 8 | payload[at + 1];
        if (name == 3)
            conn->max_streams = value;
        if (name == 4) {
            int64_t delta = (int64_t)value - conn->initial_window;
            conn->initial_window = value;
            for (int i = 0; i < BUCKETS; i++)
                for (struct stream *stream = conn->buckets[i]; stream; stream = stream->next)
                    stream->send_window += delta;
        }
    }
    conn->settings_seen = true;
    frame(conn, SETTINGS, ACK, 0, NULL, 0);
}

static void control_frame(struct conn *conn, int kind, int flags, uint32_t id, const uint8_t *payload, size_t size)
{
    struct stream *stream;
    switch (kind) {
    case SETTINGS:
        settings_frame(conn, flags, payload, size);
        break;
    case PING:
        if (!(flags & ACK))
            frame(conn, PING, ACK, 0, payload, size);
        break;
    case WINDOW_UPDATE:
        if (!id)
            conn->send_window += u32(payload);
        else if ((stream = find(conn, id)))
            stream->send_window += u32(payload);
        break;
    case RST_STREAM:
        stream = find(conn, id);
        if (stream && stream->tunnel)
            client_lost(stream);
        else if (stream)
            stream_drop(stream, false);
        break;
    case GOAWAY:
        conn->goaway = true;
        break;
    }
}

void h2_data(struct conn *conn)
{
    struct buffer *in = &conn->in;
    conn_wants_flush(conn);
    if (!conn->preface_seen) {
        if (in->end - in->start < sizeof PREFACE - 1)
            return;
        if (memcmp(in->data + in->start, PREFACE, sizeof PREFACE - 1))
            die("a client that does not speak HTTP/2");
        in->start += sizeof PREFACE - 1;
        conn->preface_seen = true;
    }
    while (!conn->dead && in->end - in->start >= 9) {
        const uint8_t *at = in->data + in->start;
        size_t size = (size_t)at[0] << 16 | (size_t)at[1] << 8 | at[2];
        if (in->end - in->start < size + 9)
            return;
        uint32_t id = u32(at + 5) & 0x7fffffff;
        in->start += size + 9;
        if (at[3] == DATA)
            data_frame(conn, at[4], id, at + 9, size);
        else if (at[3] == HEADERS)
            headers_frame(conn, at[4], id, at + 9);
        else
            control_frame(conn, at[3], at[4], id, at + 9, size);
    }
}
