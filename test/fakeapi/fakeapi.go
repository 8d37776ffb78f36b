// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fakeapi serves client-go's fake clientset over HTTP. A plugin in a separate process can use it as its API
// server. It implements the requests that a DRA plugin makes, and no others. A test can make requests fail with an API
// error or a broken connection.
package fakeapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
)

// Server is a fake API server.
type Server struct {
	// Client reads and writes the server's objects directly. Refuse does not affect it.
	Client *fake.Clientset
	// URL is the server's base URL.
	URL string

	// network has the AddressPools, and blocks the AddressBlocks.
	network clienttesting.Fake
	blocks  *blocks
	scheme  *runtime.Scheme
	codecs  serializer.CodecFactory

	http   *httptest.Server
	refuse atomic.Pointer[func(*http.Request) error]
}

// New starts a server that contains objects. The caller must call Close.
func New(objects ...runtime.Object) *Server {
	s := &Server{Client: fake.NewClientset(objects...), scheme: runtime.NewScheme(), blocks: newBlocks()}
	utilruntime.Must(errors.Join(scheme.AddToScheme(s.scheme), network.AddToScheme(s.scheme)))
	s.codecs = serializer.NewCodecFactory(s.scheme)
	tracker := clienttesting.NewObjectTracker(s.scheme, s.codecs.UniversalDecoder())
	s.network.AddReactor("*", "*", clienttesting.ObjectReaction(tracker))
	s.network.AddWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		w, err := tracker.Watch(action.GetResource(), action.GetNamespace())
		return true, w, err
	})
	s.http = httptest.NewServer(s)
	s.URL = s.http.URL
	return s
}

// AddPool creates an AddressPool.
func (s *Server) AddPool(p *network.AddressPool) error {
	gvr := network.GroupVersion.WithResource(network.PoolResource)
	_, err := s.network.Invokes(clienttesting.NewRootCreateAction(gvr, p), nil)
	return err
}

// UpdatePool replaces an AddressPool.
func (s *Server) UpdatePool(p *network.AddressPool) error {
	gvr := network.GroupVersion.WithResource(network.PoolResource)
	_, err := s.network.Invokes(clienttesting.NewRootUpdateAction(gvr, p), nil)
	return err
}

// Blocks returns all AddressBlocks.
func (s *Server) Blocks() []network.AddressBlock { return s.blocks.list(fields.Everything()).Items }

// DeleteBlocks deletes all AddressBlocks.
func (s *Server) DeleteBlocks() {
	s.blocks.deleteWhere(func(*network.AddressBlock) bool { return true })
}

// DeleteBlocksOf deletes the AddressBlocks of a node, as the controller does when the node is lost.
func (s *Server) DeleteBlocksOf(node string) {
	s.blocks.deleteWhere(func(b *network.AddressBlock) bool { return b.Spec.Node == node })
}

// MoveBlocks deletes the AddressBlocks of a node and creates blocks of another node with their addresses, as the
// controller and that node do when the first node is lost.
func (s *Server) MoveBlocks(from, to string) { s.blocks.move(from, to) }

// Close closes all connections and stops the server.
func (s *Server) Close() {
	s.http.CloseClientConnections()
	s.http.Close()
}

// Refuse makes a request fail if f returns an error for it. The server sends an apierrors.APIStatus as the response;
// any other error breaks the connection. A nil f accepts all requests again.
func (s *Server) Refuse(f func(*http.Request) error) { s.refuse.Store(&f) }

// kinds maps each resource that the server knows to its kind.
var kinds = map[string]schema.GroupVersionKind{
	"resourceclaims": resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"),
	"resourceslices": resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"),
	"nodes":          corev1.SchemeGroupVersion.WithKind("Node"),
	"pods":           corev1.SchemeGroupVersion.WithKind("Pod"),
	"events":         {Group: "events.k8s.io", Version: "v1", Kind: "Event"},
	"addresspools":   network.GroupVersion.WithKind("AddressPool"),
	"addressblocks":  network.GroupVersion.WithKind("AddressBlock"),
}

// target is the object or collection that a request's path names.
type target struct {
	gvr                          schema.GroupVersionResource
	gvk                          schema.GroupVersionKind
	namespace, name, subresource string
}

// parse returns the target of an API path. It reports whether the server knows
// the resource in that version.
func parse(path string) (t target, ok bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	if len(parts) < 3 || parts[0] == "apis" && len(parts) < 4 {
		return t, false
	}
	if parts[0] == "apis" {
		t.gvr.Group, t.gvr.Version, parts = parts[1], parts[2], parts[3:]
	} else {
		t.gvr.Version, parts = parts[1], parts[2:]
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		t.namespace, parts = parts[1], parts[2:]
	}
	parts = append(parts, "", "")
	t.gvr.Resource, t.name, t.subresource = parts[0], parts[1], parts[2]
	t.gvk, ok = kinds[t.gvr.Resource]
	return t, ok && t.gvk.GroupVersion() == t.gvr.GroupVersion()
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if refuse := s.refuse.Load(); refuse != nil && *refuse != nil {
		if err := (*refuse)(r); err != nil {
			writeError(w, err)
			return
		}
	}
	t, ok := parse(r.URL.Path)
	if !ok {
		writeError(w, apierrors.NewNotFound(schema.GroupResource{}, r.URL.Path))
		return
	}
	if r.URL.Query().Get("watch") != "" {
		s.watch(w, r, t)
		return
	}
	object, err := s.do(r, t)
	if err != nil {
		writeError(w, err)
		return
	}
	raw, err := s.encode(object, t.gvk.GroupVersion())
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	_, _ = w.Write(raw)
}

// invoker returns the fake that stores the objects of a resource.
func (s *Server) invoker(t target) *clienttesting.Fake {
	if t.gvr.Group == network.GroupName {
		return &s.network
	}
	return &s.Client.Fake
}

// do performs a request other than a watch and returns the object to send.
func (s *Server) do(r *http.Request, t target) (runtime.Object, error) {
	invoker := s.invoker(t)
	defer invoker.ClearActions() // it records every request otherwise
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	if t.gvr.Resource == network.BlockResource {
		return s.blocks.do(r, t.name, body, func(raw []byte) (runtime.Object, error) {
			object, _, err := s.codecs.UniversalDeserializer().Decode(raw, &t.gvk, nil)
			return object, err
		})
	}
	empty, err := s.scheme.New(t.gvk)
	if err != nil {
		return nil, err
	}
	switch r.Method {
	case http.MethodGet:
		if t.name != "" {
			return invoker.Invokes(clienttesting.NewGetAction(t.gvr, t.namespace, t.name), empty)
		}
		list, err := s.scheme.New(t.gvk.GroupVersion().WithKind(t.gvk.Kind + "List"))
		if err != nil {
			return nil, err
		}
		action := clienttesting.NewListAction(t.gvr, t.gvk, t.namespace, metav1.ListOptions{})
		return invoker.Invokes(action, list)
	case http.MethodDelete:
		_, err := invoker.Invokes(clienttesting.NewDeleteAction(t.gvr, t.namespace, t.name), empty)
		return &metav1.Status{Status: metav1.StatusSuccess}, err
	case http.MethodPatch:
		kind := types.PatchType(strings.Split(r.Header.Get("Content-Type"), ";")[0])
		if kind == types.ApplyCBORPatchType || kind == "application/apply-patch+yaml" {
			kind = types.ApplyPatchType
		}
		force := r.URL.Query().Get("force") == "true"
		action := clienttesting.NewPatchSubresourceActionWithOptions(t.gvr, t.namespace, t.name, kind, body,
			metav1.PatchOptions{FieldManager: r.URL.Query().Get("fieldManager"), Force: &force}, t.subresource)
		return invoker.Invokes(action, empty)
	}
	object, _, err := s.codecs.UniversalDeserializer().Decode(body, &t.gvk, nil)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if r.Method == http.MethodPost {
		if named, err := meta.Accessor(object); err == nil {
			if named.GetName() == "" {
				named.SetName(named.GetGenerateName() + string(uuid.NewUUID()))
			}
			named.SetUID(uuid.NewUUID())
		}
		return invoker.Invokes(clienttesting.NewCreateAction(t.gvr, t.namespace, object), empty)
	}
	action := clienttesting.NewUpdateSubresourceAction(t.gvr, t.subresource, t.namespace, object)
	return invoker.Invokes(action, empty)
}

// watch streams events until the client disconnects.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, t target) {
	// The fake clientset cannot stream initial events. On this error the client lists instead.
	if r.URL.Query().Get("sendInitialEvents") != "" {
		writeError(w, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil))
		return
	}
	if t.gvr.Resource == network.BlockResource {
		s.watchBlocks(w, r, t)
		return
	}
	watcher, err := s.invoker(t).InvokesWatch(clienttesting.NewWatchAction(t.gvr, t.namespace, metav1.ListOptions{}))
	if err != nil {
		writeError(w, err)
		return
	}
	defer watcher.Stop()
	send := s.stream(w, r, t)
	for {
		select {
		case <-r.Context().Done():
			return
		case event, ok := <-watcher.ResultChan():
			if !ok || send(event.Type, event.Object) != nil {
				return
			}
		}
	}
}

// watchBlocks streams events of AddressBlocks until the client disconnects.
func (s *Server) watchBlocks(w http.ResponseWriter, r *http.Request, t target) {
	selector, err := selectorOf(r)
	if err != nil {
		writeError(w, err)
		return
	}
	version, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil {
		writeError(w, apierrors.NewBadRequest("watches must start at a resource version"))
		return
	}
	send := s.stream(w, r, t)
	s.blocks.events(r.Context(), version, selector, func(kind watch.EventType, b *network.AddressBlock) error {
		return send(kind, b)
	})
}

// stream begins the response of a watch, and returns a function that sends an event.
func (s *Server) stream(
	w http.ResponseWriter, r *http.Request, t target,
) (send func(watch.EventType, runtime.Object) error) {
	encode := s.encode
	if strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
		encode = encodeMetadata
	}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	flusher, _ := w.(http.Flusher)
	flusher.Flush()
	return func(kind watch.EventType, object runtime.Object) error {
		raw, err := encode(object, t.gvk.GroupVersion())
		if err != nil {
			return err
		}
		event := metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}}
		if err := json.NewEncoder(w).Encode(event); err != nil {
			return err
		}
		flusher.Flush()
		return nil
	}
}

func (s *Server) encode(object runtime.Object, gv schema.GroupVersion) ([]byte, error) {
	if status, ok := object.(*metav1.Status); ok {
		return json.Marshal(status)
	}
	return runtime.Encode(s.codecs.LegacyCodec(gv), object)
}

// encodeMetadata encodes the metadata of an object, for clients that do not need more.
func encodeMetadata(object runtime.Object, _ schema.GroupVersion) ([]byte, error) {
	accessor, err := meta.Accessor(object)
	if err != nil {
		return nil, err
	}
	partial := meta.AsPartialObjectMetadata(accessor)
	partial.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"))
	return json.Marshal(partial)
}

func writeError(w http.ResponseWriter, err error) {
	status, ok := err.(apierrors.APIStatus)
	if !ok {
		panic(http.ErrAbortHandler) // net/http closes the connection without a response
	}
	s := status.Status()
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	if s.Details != nil && s.Details.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", fmt.Sprint(s.Details.RetryAfterSeconds))
	}
	w.WriteHeader(int(s.Code))
	_ = json.NewEncoder(w).Encode(s)
}
