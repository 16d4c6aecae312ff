use super::*;
use arrow_array::*;
use arrow_schema::{DataType, Field, Schema};
use std::sync::Arc;

/// Every type that rows of datasets consist of, with nulls and in slices.
fn batch(rows: usize) -> RecordBatch {
    let text: Vec<Option<String>> = (0..rows + 2)
        .map(|i| (i % 5 != 3).then(|| "ü".repeat(i % 40)))
        .collect();
    let bytes: Vec<Vec<u8>> = (0..rows + 2)
        .map(|i| vec![i as u8; i * 37 % 9000])
        .collect();
    let lists = ListArray::from_iter_primitive::<types::Int32Type, _, _>(
        (0..rows + 2).map(|i| Some((0..i as i32 % 4).map(Some))),
    );
    let words = ["a", "b", "c"];
    let dictionary: DictionaryArray<types::Int8Type> =
        (0..rows + 2).map(|i| words[i % 3]).collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("text", Arc::new(StringArray::from_iter(text))),
        ("bytes", Arc::new(BinaryArray::from_iter_values(&bytes))),
        ("views", Arc::new(BinaryViewArray::from_iter_values(&bytes))),
        (
            "numbers",
            Arc::new(Int64Array::from_iter(
                (0..rows as i64 + 2).map(|i| (i % 3 != 0).then_some(i)),
            )),
        ),
        (
            "flags",
            Arc::new(BooleanArray::from_iter(
                (0..rows + 2).map(|i| Some(i % 3 == 0)),
            )),
        ),
        ("lists", Arc::new(lists)),
        ("words", Arc::new(dictionary)),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, c)| (n, c, true)))
        .unwrap()
        .slice(2, rows)
}

fn wire(frame: Frame) -> Vec<u8> {
    let (header, size) = (frame.header, frame.wire_bytes());
    let bytes = frame.into_pieces(()).concat();
    assert_eq!(bytes.len() as u64, size);
    assert_eq!(
        FrameHeader::decode(&bytes[..FRAME_HEADER_BYTES]).unwrap(),
        header
    );
    bytes
}

/// The payload as a receiver gets it: aligned, without padding.
fn payload(wire: &[u8]) -> (FrameHeader, Buffer) {
    let header = FrameHeader::decode(&wire[..FRAME_HEADER_BYTES]).unwrap();
    let bytes = &wire[FRAME_HEADER_BYTES..];
    assert_eq!(bytes.len() as u64, header.wire_payload_bytes());
    (
        header,
        Buffer::from(&bytes[..header.payload_bytes as usize]),
    )
}

#[test]
fn rows_come_back_as_they_were_and_lie_inside_the_payload() {
    for rows in [0, 1, 7, 300] {
        let sent = batch(rows);
        let tag = FrameTag {
            epoch: 1,
            step: u64::MAX,
            next: 77,
            padding: 2,
        };
        let (header, payload) = payload(&wire(Frame::rows(tag, &sent).unwrap()));
        assert_eq!((header.tag, header.rows as usize), (tag, rows));
        let got = decode_rows(&header, &payload).unwrap();
        assert_eq!(got, sent);
        let within = payload.as_ptr_range();
        for column in got
            .columns()
            .iter()
            .filter(|c| !matches!(c.data_type(), DataType::Dictionary(..)))
        {
            for buffer in column.to_data().buffers().iter().filter(|b| !b.is_empty()) {
                assert!(
                    within.contains(&buffer.as_ptr()),
                    "{:?} was copied",
                    column.data_type()
                );
                assert_eq!(
                    (buffer.as_ptr() as usize - within.start as usize) % FRAME_ALIGNMENT,
                    0
                );
            }
        }
    }
}

#[test]
fn large_buffers_are_sent_from_where_they_are() {
    let data = Buffer::from_vec(vec![7u8; 100_000]);
    let offsets = arrow_buffer::OffsetBuffer::new(vec![0i32, 40_000, 100_000].into());
    let column: ArrayRef = Arc::new(BinaryArray::new(offsets, data.clone(), None));
    let sent = RecordBatch::try_from_iter([("data", column)]).unwrap();
    let frame = Frame::rows(FrameTag::default(), &sent).unwrap();
    let freed = Arc::new(());
    let pieces = frame.into_pieces(freed.clone());
    assert!(
        pieces
            .iter()
            .any(|p| p.as_ptr() == data.as_ptr() && p.len() == data.len())
    );
    assert_eq!(
        Arc::strong_count(&freed),
        2,
        "memory is held while a piece is there"
    );
    drop(pieces);
    assert_eq!(Arc::strong_count(&freed), 1);
}

#[test]
fn rows_without_columns_keep_their_number() {
    let options = RecordBatchOptions::new().with_row_count(Some(5));
    let sent =
        RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap();
    let (header, payload) = payload(&wire(Frame::rows(FrameTag::default(), &sent).unwrap()));
    assert_eq!(decode_rows(&header, &payload).unwrap().num_rows(), 5);
}

#[test]
fn errors_and_ends_tell_what_they_carry() {
    let error = Error::version_changed("b/k changed").hint("open the dataset again");
    let (header, bytes) = payload(&wire(Frame::error(FrameTag::default(), &error)));
    let got = decode_error(&header, &bytes);
    assert_eq!(
        (got.kind(), got.to_string()),
        (error.kind(), error.to_string())
    );
    let (header, bytes) = payload(&wire(Frame::end(FrameTag::default(), b"{}".to_vec())));
    assert_eq!(
        (header.kind, bytes.as_slice()),
        (FrameKind::End, &b"{}"[..])
    );
    assert_eq!(
        wire(Frame::keep_alive(FrameTag::default(), Vec::new())).len(),
        FRAME_HEADER_BYTES
    );
    assert!(decode_rows(&header, &bytes).is_err());
}

#[test]
fn a_header_with_any_bit_changed_is_refused() {
    let good = Frame::rows(
        FrameTag {
            epoch: 3,
            step: 4,
            next: 5,
            padding: 0,
        },
        &batch(3),
    )
    .unwrap()
    .header
    .encode();
    for bit in 0..FRAME_HEADER_BYTES * 8 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(
            FrameHeader::decode(&bad).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "bit {bit}"
        );
    }
    assert!(FrameHeader::decode(&good[..63]).is_err());
    let sealed = |change: &dyn Fn(&mut [u8; FRAME_HEADER_BYTES])| {
        let mut bytes = good;
        change(&mut bytes);
        let crc = forebay_core::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        FrameHeader::decode(&bytes)
    };
    assert!(sealed(&|_| {}).is_ok());
    assert!(sealed(&|b| b[4] = 9).is_err(), "an unknown kind");
    assert!(sealed(&|b| b[6] = 1).is_err(), "an unknown flag");
    assert!(sealed(&|b| b[39] = 1).is_err(), "a payload of 2^56 bytes");
}

#[test]
fn a_payload_that_is_cut_or_changed_is_an_error_and_never_a_panic() {
    let sent = batch(40);
    let (header, good) = payload(&wire(Frame::rows(FrameTag::default(), &sent).unwrap()));
    let sealed = |bytes: &[u8], rows: u32| {
        let header = FrameHeader {
            rows,
            payload_bytes: bytes.len() as u64,
            payload_crc: forebay_core::crc32c(bytes),
            ..header
        };
        decode_rows(&header, &Buffer::from(bytes))
    };
    assert!(sealed(&good, 40).is_ok());
    assert!(sealed(&good, 41).is_err(), "another number of rows");
    assert!(decode_rows(&header, &good.slice_with_length(0, good.len() - 1)).is_err());
    for end in (0..good.len()).step_by(13) {
        assert_eq!(
            sealed(&good[..end], 40).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "cut at {end}"
        );
    }
    // The messages are a few hundred bytes each: each of their bytes in turn takes a few values.
    // Bytes of the data may be anything.
    let mut refused = 0;
    for at in 0..good.len().min(6000) {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bad = good.to_vec();
            bad[at] = value;
            match sealed(&bad, 40) {
                Ok(batch) => assert_eq!(batch.num_rows(), 40),
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Corrupt);
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 500, "{refused}");
}

#[test]
fn a_compressed_body_is_refused() {
    let options = write_options()
        .unwrap()
        .try_with_compression(Some(arrow_ipc::CompressionType::ZSTD))
        .unwrap();
    let column: ArrayRef = Arc::new(Int64Array::from(vec![0; 100_000]));
    let sent = RecordBatch::try_from_iter([("n", column)]).unwrap();
    let mut bytes = Vec::new();
    let mut writer =
        arrow_ipc::writer::StreamWriter::try_new_with_options(&mut bytes, &sent.schema(), options)
            .unwrap();
    writer.write(&sent).unwrap();
    writer.finish().unwrap();
    drop(writer);
    let header = FrameHeader {
        kind: FrameKind::Rows,
        flags: 0,
        tag: FrameTag::default(),
        rows: 100_000,
        payload_bytes: bytes.len() as u64,
        payload_crc: forebay_core::crc32c(&bytes),
    };
    let error = decode_rows(&header, &Buffer::from(&bytes[..])).unwrap_err();
    assert!(error.to_string().contains("compressed"), "{error}");
}

#[test]
fn a_field_that_is_null_may_be_long_and_costs_nothing() {
    let schema = Arc::new(Schema::new(vec![Field::new(
        "nothing",
        DataType::Null,
        true,
    )]));
    let sent = RecordBatch::try_new(schema, vec![Arc::new(NullArray::new(1_000_000))]).unwrap();
    let (header, payload) = payload(&wire(Frame::rows(FrameTag::default(), &sent).unwrap()));
    assert!(payload.len() < 4096);
    assert_eq!(
        decode_rows(&header, &payload).unwrap().num_rows(),
        1_000_000
    );
}
