// Command manifests decodes Kubernetes manifests strictly into the types of k8s.io/api: a field
// that is misspelt, in the wrong place, given twice or of another type is an error.
//
//	manifests FILE…   a line "FILE: KIND NAME" for each object, or "FILE: document N: ERROR" for
//	                  each that is wrong, with status 1
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
)

func main() {
	known := runtime.NewScheme()
	groups := runtime.NewSchemeBuilder(apps.AddToScheme, core.AddToScheme, policy.AddToScheme)
	if err := groups.AddToScheme(known); err != nil {
		panic(err)
	}
	strictly := json.SerializerOptions{Yaml: true, Strict: true}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, known, known, strictly)
	status := 0
	for _, path := range os.Args[1:] {
		if !check(decoder, path) {
			status = 1
		}
	}
	os.Exit(status)
}

func check(decoder runtime.Decoder, path string) bool {
	text, err := os.ReadFile(path)
	if err != nil {
		fmt.Println(err)
		return false
	}
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	right, objects := true, 0
	for number := 1; ; number++ {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			var object runtime.Object
			var kind *schema.GroupVersionKind
			if object, kind, err = decoder.Decode(document, nil, nil); err == nil {
				objects++
				named, _ := meta.Accessor(object)
				fmt.Printf("%s: %s %s\n", path, kind.Kind, named.GetName())
				continue
			}
		}
		why := strings.Join(strings.Fields(err.Error()), " ")
		fmt.Printf("%s: document %d: %s\n", path, number, why)
		right = false
	}
	if objects == 0 {
		fmt.Printf("%s: no objects\n", path)
		return false
	}
	return right
}
