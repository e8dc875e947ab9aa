//! Writes the first inputs: a good file of each kind into `corpus/TARGET/`, below the folder it is started in.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::basic::Compression as Codec;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

const DOCUMENTS: &str = "{\"text\": \"the layer of a sparse column is the lowest norm of all\", \"n\": 1}\n\
    {\"text\": \"weight and row \\u00e9 \\ud83d\\ude00\"}\n\n{\"url\": [1, {\"a\": null}], \"text\": \"\"}\n";

fn put(target: &str, name: &str, content: &[u8]) {
    let folder = Path::new("corpus").join(target);
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join(name), content).expect("a file");
}

fn gzipped(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).expect("memory");
    encoder.finish().expect("memory")
}

fn parquet(properties: WriterProperties) -> Vec<u8> {
    let schema = "message rows { optional int64 id; required binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let mut writer =
        SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).expect("memory");
    for rows in [&["the layer", "of a column", "the layer"][..], &["", "é"]] {
        let mut group = writer.next_row_group().expect("memory");
        let mut column = group.next_column().expect("memory").expect("the first");
        let levels = vec![0; rows.len()];
        column
            .typed::<parquet::data_type::Int64Type>()
            .write_batch(&[], Some(&levels), None)
            .expect("memory");
        column.close().expect("memory");
        let mut column = group.next_column().expect("memory").expect("the second");
        let rows: Vec<ByteArray> = rows.iter().map(|row| ByteArray::from(*row)).collect();
        column.typed::<ByteArrayType>().write_batch(&rows, None, None).expect("memory");
        column.close().expect("memory");
        group.close().expect("memory");
    }
    writer.into_inner().expect("memory")
}

fn main() {
    let models = tempfile::tempdir().expect("a temporary folder");
    prune_fuzz::write_models(models.path());
    let read = |name: &str| fs::read(models.path().join(name)).expect("written above");
    let header = |file: &[u8]| {
        let mut length = [0; 8];
        length.copy_from_slice(&file[..8]);
        file[..8 + u64::from_le_bytes(length) as usize].to_vec()
    };
    put("header", "whole", &read("m/model.safetensors"));
    let shards = fs::read_dir(models.path().join("s")).expect("written above");
    let smallest = shards
        .map(|entry| entry.expect("written above").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .min_by_key(|path| path.metadata().map_or(u64::MAX, |metadata| metadata.len()));
    let shard = fs::read(smallest.expect("there are shards")).expect("written above");
    put("header", "shard", &shard);
    put("header", "only", &header(&read("m/model.safetensors")));
    put(
        "header",
        "tiny",
        &[
            &[56, 0, 0, 0, 0, 0, 0, 0][..],
            br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  "#,
            &[0; 8],
        ]
        .concat(),
    );
    prune_fuzz::write_packed(models.path());
    for (number, file) in prune_fuzz::PACKED_FILES.into_iter().enumerate() {
        let content = [vec![number as u8], read(&format!("p/{file}"))].concat();
        put("packed", file, &content);
    }
    put("index", "good", &read("s/model.safetensors.index.json"));
    put("config", "good", &read("m/config.json"));
    put("config", "llama3", br#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 320, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "tie_word_embeddings": true}"#);
    put("config", "dynamic", br#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "head_dim": 4, "vocab_size": 320, "rope_scaling": {"type": "dynamic", "factor": 2}, "eos_token_id": [1, 2]}"#);
    put(
        "device_map",
        "good",
        br#"{"model.layers.0": 0, "model.layers.1": "cpu", "model.norm": "disk", "": "cuda:1"}"#,
    );
    put("layer_ratios", "list", b"[0.5, 0.25, 0.125]");
    put("layer_ratios", "some", br#"{"0": 0.3, "31": 0.7}"#);
    put(
        "recipe",
        "models",
        b"merge_method: ties\nbase_model: base\nmodels:\n  - model: a+lora@v1\n    parameters: &p {weight: 1e-3, density: [0.9, 0.3]}\n\
        \x20 - model: {model: {path: b@c, revision: d}}\n    parameters:\n      <<: *p\n      weight:\n        - {filter: mlp, value: [0.2, 1]}\n\
        \x20       - {filter: '*', value: 0.5}\nparameters: {normalize: off, lambda: 1.5, int8_mask: yes}\ndtype: bfloat16\nout_dtype: fp32\n\
        tokenizer:\n  source: union\n  pad_to_multiple_of: 8\n  tokens:\n    \"<|user|>\": {source: {kind: model_token, model: a, token: \"\\u2581\"}}\n\
        \x20   x: {source: {kind: zero}, force: true}\nchat_template: |\n  {{ messages }}\n",
    );
    put(
        "recipe",
        "slices",
        b"merge_method: passthrough\nmodules:\n  default:\n    slices:\n      - sources: [{model: a, layer_range: [0, 3]}]\n\
        \x20     - sources:\n          - model: b\n            layer_range: [2, 5]\n            parameters: {scale: [{filter: up_proj, value: 0.5}]}\n\
        \x20       parameters: {scale: 2}\ntokenizer_source: base\n",
    );
    put(
        "state",
        "good",
        br#"{"schema":1,"arguments":["prune"],"started_unix_seconds":1,"settings":{"eval":"none"},"layers":[{"layer":0,"seconds":0.5,
        "sparsity":0.5,"matrices":[{"name":"model.layers.0.self_attn.q_proj","shape":[8,8],"zeros_before":0,"zeros":32,"pruned":32,
        "mask_sha256":"00","relative_output_error":0.25}]}],"tensors":{"model.layers.0.self_attn.q_proj.weight":
        "0011223344556677889900112233445566778899001122334455667788990011"},"perplexity":{"dense":null,"pruned":{"perplexity":9.5,
        "mean_loss":2.25,"standard_error":0.0,"windows":1,"seqlen":8}},"warnings":[],"sessions":[{"started_unix_seconds":1,"seconds":2.5,
        "first_layer":0}],"phases":[{"phase":"read","seconds":0.5,"peak_anonymous":1}],"memory":[]}"#,
    );
    put("tokenizer", "good", &read("m/tokenizer.json"));
    put("tokenizer", "llama2", br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":1,"content":"<s>","single_word":false,
        "lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend",
        "prepend":"\u2581"},{"type":"Replace","pattern":{"String":" "},"content":"\u2581"}]},"pre_tokenizer":null,"post_processor":
        {"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[
        {"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":0}}],"special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":
        ["<s>"]}}},"decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"\u2581"},"content":" "},
        {"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","dropout":null,
        "unk_token":"<unk>","continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,"byte_fallback":true,
        "ignore_merges":false,"vocab":{"<unk>":0,"<s>":1,"\u2581":2,"t":3,"h":4,"e":5,"th":6,"the":7},"merges":["t h","th e"]}}"#);
    put("jsonl", "good", DOCUMENTS.as_bytes());
    put("text", "good", b"a = Title = \n\n the layer of a column \r\n\x1c\n and row");
    // The first byte says whether what follows is packed already.
    put("gz", "packed", &[&[0][..], &gzipped(DOCUMENTS.as_bytes())].concat());
    put("gz", "two_members", &[&[0][..], &gzipped(DOCUMENTS.as_bytes()).repeat(2)].concat());
    put("gz", "to_pack", &[&[1][..], DOCUMENTS.as_bytes()].concat());
    for (name, codec, version, dictionary) in [
        ("plain", Codec::UNCOMPRESSED, WriterVersion::PARQUET_1_0, false),
        ("dictionary", Codec::UNCOMPRESSED, WriterVersion::PARQUET_1_0, true),
        ("snappy", Codec::SNAPPY, WriterVersion::PARQUET_1_0, true),
        ("zstd_v2", Codec::ZSTD(Default::default()), WriterVersion::PARQUET_2_0, true),
        ("delta_v2", Codec::UNCOMPRESSED, WriterVersion::PARQUET_2_0, false),
    ] {
        let properties = WriterProperties::builder()
            .set_compression(codec)
            .set_writer_version(version)
            .set_dictionary_enabled(dictionary);
        put("parquet", name, &parquet(properties.build()));
    }
}
